"""`swarm train`: pre-training by one trainer on this machine, in rounds.

The rounds are those of several trainers (`swarm.jobs.outer`), with this one alone or with others
(`peers.outer.alone.averaging`). Alone, with an outer learning rate of 1 and no outer
momentum they are plain training. Each round ends with a durable state, from which `--resume`
continues. The child computes."""

import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from peers.outer.alone.averaging import STATE_FILE, Alone, Averaging, Library, ToMerge
from swarm.errors import DECODE_ERRORS, UserError
from swarm.events import Event, Events
from swarm.jobs import outer as jobs
from swarm.jobs.training import Figures
from swarm.terminal.output import removed_on_failure
from swarm.world import ChildDied, client
from swarm.world.compute import LocalCompute
from swarm.world.disk import replace_file, sync_path
from swarm.world.machine import Machine
from swarm.world.restarts import Restarts

SERVICE = "peers.outer.learning.service:open_service"
START_SECONDS = 600.0
"""Time for the child to import torch."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What `progress.json` says of a training, for its resumption."""

    round: int
    """The last complete round; its state is in the folder."""
    tokens: int
    plan: "Plan"
    data: str = ""
    """What the data held (`ReplicaStarted.data`)."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, and how: a resumed training keeps it."""

    job: jobs.StartReplica
    outer_learning_rate: float
    outer_momentum: float
    fresh: bool
    """Begin with random weights."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of the command."""

    out: Path
    resume: bool
    setup: jobs.OuterSetup
    plan: Plan
    backend: Library | None = None
    """Averages with other trainers; None: there are none."""


Say = Callable[[dict[str, Any]], None]


async def run_train(options: TrainOptions, say: Say) -> None:
    """Train a model and write the result.

    Calls `say` with an event at the start, after every round, and at the end. Raises `UserError`.
    """
    check(options.plan)
    # A whole round is worth keeping: --resume goes on from there.
    with removed_on_failure(options.out, (options.out / "progress.json").exists):
        await _train(options, begin_folder(options), say)


async def _train(options: TrainOptions, done: Progress, say: Say) -> None:
    name = options.backend.name if options.backend else ""
    events = Events(Machine(), name)
    restarts = Restarts(events, name)

    def hear(event: Event) -> None:
        if event.name == "compute.child_restarted":
            say({"event": "restarted", **event.fields})

    def say_all(told: dict[str, Any]) -> None:
        say(told)
        if told["event"] == "trained":
            restarts.succeeded()

    async def live() -> None:
        nonlocal done
        async with LocalCompute(events=events).child(
            SERVICE, options.setup, name="train", start_deadline_seconds=START_SECONDS
        ) as child:
            alone, service = client(jobs.AloneService, child), client(jobs.OuterService, child)
            try:
                await Training(options, alone, service, say_all).run(done)
            except ChildDied:
                done = begin_folder(replace(options, resume=True))  # the last whole round
                raise

    events.add_sink(hear)
    await restarts.run(live)


def check(plan: Plan) -> None:
    """Check the plan's bounds; raises `UserError`."""
    job = plan.job
    for flag, value, fine, bounds in (
        ("inner-steps", job.inner_steps, job.inner_steps >= 1, "at least 1"),
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
        self, options: TrainOptions, alone: jobs.AloneService, service: jobs.OuterService, say: Say
    ) -> None:
        self._shown, self._out = options.out, options.out.absolute()
        self._plan = options.plan
        self._backend = options.backend
        self._alone, self._service, self._say = alone, service, say
        self._known: Figures = {}
        """What is known of the present state, for the curves."""

    def _path(self, name: str) -> str:
        return str(self._out / name)

    async def run(self, done: Progress) -> None:
        """Train from the round after `done` to the end."""
        job = self._plan.job
        if self._plan.fresh:
            base = self._path("base")
            if done.round == 0:
                seed = self._plan.job.seed
                draw = jobs.DrawModel(model=job.model, folder=base, seed=seed)
                await self._alone.draw_model(draw)
            job = msgspec.structs.replace(job, model=base)
        started = await self._service.start(job)
        if done.data and done.data != started.data:
            raise UserError(
                f"--resume: a file of {', '.join(job.inner.data)} has changed since {self._shown} "
                "began, so the order would be another; restore it, or begin in another folder"
            )
        self._data = started.data
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
            await self._service.first_state(jobs.FirstState(folder=self._path("state-0")))
            await self._measure(0)
        async with self._others(started, done.round) as exchange:
            found = await exchange.meet(done.round, self._path(f"state-{done.round}"))
            if found is not None:
                await self._take(found, done.round, done.round)
                done = self._commit(found.round, done, 0)
                self._say({"event": "joined", "step": done.round * job.inner_steps} | found.figures)
            while done.round < job.rounds:
                done = await self._round(exchange, done)
                await self._measure(done.round)
            await exchange.end()
        policy = self._path("policy")
        state = self._path(f"state-{done.round}")
        await self._service.export_state(jobs.ExportState(state=state, folder=policy))
        await self._service.end()
        self._say({"event": "saved", "folder": str(self._shown / "policy")})

    @asynccontextmanager
    async def _others(self, started: jobs.ReplicaStarted, done: int) -> AsyncIterator[Alone]:
        """The exchange with the other trainers; raises `UserError` if none can be reached."""
        backend = self._backend
        if backend is None:
            yield Alone()
            return
        self._say({"event": "connecting", "backend": backend.name})
        state_bytes = (self._out / f"state-{done}" / STATE_FILE).stat().st_size
        async with backend.connect(started.shapes, state_bytes) as averaging:
            yield Averaging(averaging, self._service, self._out, self._say)

    async def _round(self, exchange: Alone, done: Progress) -> Progress:
        """Train the next round, and merge it with the other trainers'; return what is done then."""
        began = time.monotonic()
        round_ = done.round + 1
        before = self._path(f"state-{done.round}")
        inner = self._out / f"inner-{done.round}"
        contribution = self._path("contribution")
        trained = await self._service.train(
            jobs.TrainRound(
                round=round_,
                state=before,
                inner_before=str(inner) if inner.exists() else "",
                inner_after=self._path(f"inner-{round_}"),
                contribution=contribution,
                known={**self._known, "tokens_merged": done.tokens},
            )
        )
        seconds = max(1e-9, time.monotonic() - began)
        own = jobs.Contributed(
            trainer=self._plan.job.trainer, folder=contribution, tokens=trained.tokens
        )
        merge = await exchange.exchange(round_, before, own)
        await self._take(merge, done.round, round_)
        self._say(
            {
                "event": "trained",
                "step": merge.round * self._plan.job.inner_steps,
                **trained.figures,
                "tokens": trained.tokens,
                "tokens_per_second": trained.tokens / seconds,
                **merge.figures,
            }
        )
        return self._commit(merge.round, done, trained.tokens)

    async def _take(self, merge: ToMerge, begun: int, inner: int) -> None:
        """Make the state that a merge leads to, and the inner state that belongs to it.

        `begun`: the round whose state this trainer had; `inner`: that of its inner state."""
        after = self._out / f"state-{merge.round}"
        if merge.given:
            merged = await self._service.merge(
                jobs.MergeRound(
                    state=merge.base,
                    contributions=merge.given,
                    momentum=self._plan.outer_momentum,
                    learning_rate=self._plan.outer_learning_rate,
                    folder=str(after),
                )
            )
            for each in merged.left_out:
                raise UserError(f"round {merge.round} cannot be merged: {each.problem}")
        elif merge.round != begun:
            _move(Path(merge.base), after)
        if merge.round != inner and (self._out / f"inner-{inner}").exists():
            _move(self._out / f"inner-{inner}", self._out / f"inner-{merge.round}")

    async def _measure(self, round_: int) -> None:
        state = self._path(f"state-{round_}")
        loss = await self._service.measure(jobs.MeasureState(state=state))
        if loss is not None:
            self._known = {"validation_loss": loss}
            step = round_ * self._plan.job.inner_steps
            self._say({"event": "validated", "step": step, "loss": loss})

    def _commit(self, round_: int, before: Progress, tokens: int) -> Progress:
        """Record a complete round durably, then delete what only the rounds before needed."""
        tokens += before.tokens
        done = Progress(round=round_, tokens=tokens, plan=self._plan, data=self._data)
        replace_file(self._out / "progress.json", msgspec.json.format(msgspec.json.encode(done)))
        unneeded = ["contribution", "averaged", "received"]
        if round_ != before.round:
            unneeded += [f"state-{before.round}", f"inner-{before.round}"]
        for name in unneeded:
            shutil.rmtree(self._out / name, ignore_errors=True)
        return done


def _move(old: Path, new: Path) -> None:
    """Rename a folder durably; a folder of an interrupted attempt is replaced."""
    shutil.rmtree(new, ignore_errors=True)
    old.rename(new)
    sync_path(new.parent)
