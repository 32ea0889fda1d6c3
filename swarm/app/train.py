"""`swarm train`: pre-training or fine-tuning by one trainer on this machine, in rounds.

It needs no network. The rounds are those of several trainers (`swarm.jobs.outer`), with this one
alone: with an outer learning rate of 1 and no outer momentum they are plain training. Each round
ends with a durable state, from which `--resume` continues. The child computes.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from swarm.errors import DECODE_ERRORS, UserError
from swarm.jobs.outer import (
    AloneService,
    Contributed,
    DrawModel,
    ExportState,
    FirstState,
    MeasureState,
    MergeRound,
    OuterService,
    OuterSetup,
    StartReplica,
    TrainRound,
)
from swarm.jobs.training import EndTraining
from swarm.world import client
from swarm.world.compute import LocalCompute

SERVICE = "peers.outer.learning.service:open_service"
START_SECONDS = 600.0
"""Time for the child to import torch."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What `progress.json` says of a training, for its resumption."""

    round: int
    """The last complete round; its state is in the folder."""
    tokens: int
    plan: Plan


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, and how: a resumed training keeps it."""

    job: StartReplica
    outer_learning_rate: float
    outer_momentum: float
    fresh: bool
    """Begin with random weights."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of the command."""

    out: Path
    resume: bool
    setup: OuterSetup
    plan: Plan


Say = Callable[[dict[str, Any]], None]


async def run_train(options: TrainOptions, say: Say) -> None:
    """Train a model and write the result.

    Calls `say` with an event at the start, after every round, and at the end. Raises `UserError`.
    """
    check(options.plan)
    done = begin_folder(options)
    compute = LocalCompute()
    async with compute.child(
        SERVICE, options.setup, name="train", start_deadline_seconds=START_SECONDS
    ) as child:
        alone, service = client(AloneService, child), client(OuterService, child)
        await Training(options, alone, service, say).run(done)


def check(plan: Plan) -> None:
    """Check the plan's bounds; raises `UserError`."""
    job, inner, optimiser = plan.job, plan.job.inner, plan.job.inner.optimiser
    for flag, value, fine, bounds in (
        ("inner-steps", job.inner_steps, job.inner_steps >= 1, "at least 1"),
        ("batch", inner.batch_sequences, inner.batch_sequences >= 1, "at least 1"),
        ("sequence-tokens", inner.sequence_tokens, inner.sequence_tokens >= 2, "at least 2"),
        ("z-loss", inner.z_loss, inner.z_loss >= 0, "at least 0"),
        ("validation", inner.validation_sequences, inner.validation_sequences >= 0, "at least 0"),
        (
            "learning-rate",
            optimiser.learning_rate,
            0 < optimiser.learning_rate < 1,
            "above 0 and below 1",
        ),
        ("warmup-steps", optimiser.warmup_steps, optimiser.warmup_steps >= 0, "at least 0"),
        (
            "decay-share",
            optimiser.decay_share,
            0 < optimiser.decay_share <= 1,
            "above 0, at most 1",
        ),
        ("weight-decay", optimiser.weight_decay, 0 <= optimiser.weight_decay < 1, "from 0 to 1"),
        (
            "outer-learning-rate",
            plan.outer_learning_rate,
            0 < plan.outer_learning_rate <= 2,
            "above 0, at most 2",
        ),
        ("outer-momentum", plan.outer_momentum, 0 <= plan.outer_momentum < 1, "from 0 to below 1"),
    ):
        if not fine:
            raise UserError(f"--{flag} is {value}; it must be {bounds}")


def rounds_of(steps: int, inner_steps: int) -> int:
    """Rounds of a training of so many optimiser steps; raises `UserError`."""
    if steps < 1 or inner_steps < 1 or steps % inner_steps:
        raise UserError(
            f"--steps is {steps}; it must be a multiple of --inner-steps, {inner_steps}, since a "
            "training ends with a round"
        )
    return steps // inner_steps


def begin_folder(options: TrainOptions) -> Progress:
    """Make the folder of the training, or read how far it has come; raises `UserError`."""
    out, path = options.out, options.out / "progress.json"
    if not options.resume:
        if out.exists():
            raise UserError(
                f"--out {out} exists already; choose another folder, or continue the training in "
                "it with --resume"
            )
        out.mkdir(parents=True)
        return Progress(round=0, tokens=0, plan=options.plan)
    try:
        done = msgspec.json.decode(path.read_bytes(), type=Progress)
    except FileNotFoundError:
        return Progress(round=0, tokens=0, plan=options.plan)  # it ended before the first round did
    except (OSError, *DECODE_ERRORS) as error:
        raise UserError(f"--resume: {path} cannot be read ({error}); begin again") from error
    for name, before, now in _differences(done.plan, options.plan):
        raise UserError(
            f"--resume: {name} is {now}, but {out} was trained with {before}; give the same "
            "options as before"
        )
    return done


def _differences(before: Plan, now: Plan) -> list[tuple[str, Any, Any]]:
    """Names and values of the settings in which two plans differ."""
    pairs = [
        (before, now),
        (before.job, now.job),
        (before.job.inner, now.job.inner),
        (before.job.inner.optimiser, now.job.inner.optimiser),
    ]
    return [
        (name, getattr(old, name), getattr(new, name))
        for old, new in pairs
        for name in old.__struct_fields__
        if not isinstance(getattr(old, name), msgspec.Struct)
        and getattr(old, name) != getattr(new, name)
    ]


class Training:
    """A training in its folder: state-K and inner-K after round K, and policy at the end."""

    def __init__(
        self, options: TrainOptions, alone: AloneService, service: OuterService, say: Say
    ) -> None:
        self._shown, self._out = options.out, options.out.absolute()
        self._plan = options.plan
        self._alone, self._service, self._say = alone, service, say

    def _path(self, name: str) -> str:
        return str(self._out / name)

    async def run(self, done: Progress) -> None:
        """Train from the round after `done` to the end."""
        job = self._plan.job
        if self._plan.fresh:
            base = self._path("base")
            if done.round == 0:
                seed = self._plan.job.seed
                await self._alone.draw_model(DrawModel(model=job.model, folder=base, seed=seed))
            job = msgspec.structs.replace(job, model=base)
        started = await self._service.start(job)
        self._say(
            {
                "event": "started",
                "parameters": started.parameters,
                "sequences": started.sequences,
                "rounds": job.rounds,
                "done": done.round,
            }
        )
        if done.round == 0:
            await self._service.first_state(FirstState(folder=self._path("state-0")))
            await self._measure(0)
        tokens = done.tokens
        for round_ in range(done.round + 1, job.rounds + 1):
            tokens += await self._round(round_)
            self._commit(Progress(round=round_, tokens=tokens, plan=self._plan))
            await self._measure(round_)
        policy = self._path("policy")
        state = self._path(f"state-{job.rounds}")
        await self._service.export_state(ExportState(state=state, folder=policy))
        await self._alone.end(EndTraining())
        self._say({"event": "saved", "folder": str(self._shown / "policy")})

    async def _round(self, round_: int) -> int:
        """Train and merge one round; return its tokens."""
        began = time.monotonic()
        before, after = self._path(f"state-{round_ - 1}"), self._path(f"state-{round_}")
        contribution = self._path("contribution")
        trained = await self._service.train(
            TrainRound(
                round=round_,
                state=before,
                inner_before=self._path(f"inner-{round_ - 1}") if round_ > 1 else "",
                inner_after=self._path(f"inner-{round_}"),
                contribution=contribution,
            )
        )
        own = Contributed(
            trainer=self._plan.job.trainer, folder=contribution, tokens=trained.tokens
        )
        await self._service.merge(
            MergeRound(
                state=before,
                contributions=[own],
                momentum=self._plan.outer_momentum,
                learning_rate=self._plan.outer_learning_rate,
                folder=after,
            )
        )
        self._say(
            {
                "event": "trained",
                "step": round_ * self._plan.job.inner_steps,
                **trained.figures,
                "tokens": trained.tokens,
                "tokens_per_second": trained.tokens / max(1e-9, time.monotonic() - began),
            }
        )
        return trained.tokens

    async def _measure(self, round_: int) -> None:
        state = self._path(f"state-{round_}")
        loss = (await self._service.measure(MeasureState(state=state))).loss
        if loss is not None:
            step = round_ * self._plan.job.inner_steps
            self._say({"event": "validated", "step": step, "loss": loss})

    def _commit(self, done: Progress) -> None:
        """Record a complete round durably, then delete what only the rounds before needed."""
        path = self._out / "progress.json"
        aside = path.with_suffix(".aside")
        with aside.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(done)))
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
        folder = os.open(self._out, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        for name in (f"state-{done.round - 1}", f"inner-{done.round - 1}", "contribution"):
            shutil.rmtree(self._out / name, ignore_errors=True)
