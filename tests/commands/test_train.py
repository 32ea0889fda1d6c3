"""`swarm train`: a training that is interrupted and resumed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import trio

from peers.engines.demo import make_policy
from peers.outer.alone.training import Plan, Training, TrainOptions, begin_folder, run_train
from peers.outer.learning.service import ReplicaService
from peers.outer.learning.tensor_file import Shapes
from swarm.errors import UserError
from swarm.jobs.averaging import AverageRound, AveragingService, Exchanged
from swarm.jobs.outer import Inner, OuterSetup, StartReplica
from swarm.terminal.output import removed_on_failure
from swarm.wire.manifest import Optimiser
from swarm.world import ChildDied
from tests.commands.harness import swarm as swarm_command
from tests.outer.averaging import InProcess, Meeting


class Interrupted(Exception):
    pass


def a_job(folder: Path, trainer: str, inner: dict[str, Any] | None = None, **more: Any) -> Any:
    """The training of a small policy on a small text, which this writes to the folder."""
    make_policy(folder / "base", seed=3)
    (folder / "text.txt").write_text("a small bird sings 3 songs.\n" * 200)
    learning = Optimiser(learning_rate=3e-3, warmup_steps=2, gradient_norm_max=1.0)
    return StartReplica(
        model=str(folder / "base"),
        trainer=trainer,
        seed=1,
        inner=Inner(
            data=[str(folder / "text.txt")],
            sequence_tokens=33,
            batch_sequences=4,
            optimiser=learning,
            **(inner or {}),
        ),
        **more,
    )


@pytest.mark.slow
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path: Path) -> None:
    validated = {"validation_sequences": 4}
    job = a_job(tmp_path, "alone", validated, inner_steps=4, rounds=3, compression="int8")
    plan = Plan(job=job, outer_learning_rate=0.7, outer_momentum=0.9, fresh=True)
    events: list[dict[str, Any]] = []

    def train(out: str, *, resume: bool = False, plan: Plan = plan, rounds: int = 9) -> None:
        def say(event: dict[str, Any]) -> None:
            events.append(event)
            if event["event"] == "trained" and event["step"] > 4 * rounds:
                raise Interrupted  # the round is merged, but not committed

        options = TrainOptions(out=tmp_path / out, resume=resume, setup=OuterSetup(), plan=plan)
        done = begin_folder(options)
        service = ReplicaService()
        trio.run(Training(options, service, service, say).run, done)

    train("whole")
    with pytest.raises(Interrupted):
        train("parts", rounds=1)
    other = msgspec.structs.replace(plan, outer_momentum=0.5)
    with pytest.raises(UserError, match=r"outer_momentum is 0.5, but .* was trained with 0.9"):
        train("parts", resume=True, plan=other)
    train("parts", resume=True)
    weights = [tmp_path / out / "policy" / "model.safetensors" for out in ("whole", "parts")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    losses = [event["loss"] for event in events if event["event"] == "validated"]
    assert losses[3] < losses[0] - 0.5
    kept = {path.name for path in (tmp_path / "parts").iterdir()}
    assert kept == {"base", "inner-3", "policy", "progress.json", "state-3"}


@dataclass(frozen=True)
class InOneProcess:
    """A backend without a child."""

    meeting: Meeting
    name: str = "in-process"

    @asynccontextmanager
    async def connect(self, shapes: Shapes, state_bytes: int) -> AsyncIterator[AveragingService]:
        yield InProcess(self.meeting, shapes)


@pytest.mark.slow
def test_trainers_that_average_hold_the_same_bits_and_a_late_one_too(tmp_path: Path) -> None:
    names = ("trainer-1", "trainer-2", "trainer-3")
    any_of_them = a_job(tmp_path, "", trainers=names, inner_steps=2, rounds=4, compression="fp32")
    meeting = Meeting(trainers=2)
    told: list[tuple[str, dict[str, Any]]] = []
    late = trio.Event()

    async def train(name: str) -> None:
        job = msgspec.structs.replace(any_of_them, trainer=name)

        def say(event: dict[str, Any]) -> None:
            told.append((name, event))
            if event["event"] == "trained" and event["step"] == 4:
                meeting.trainers = 3  # of rounds from now on
                late.set()

        options = TrainOptions(
            out=tmp_path / name,
            resume=False,
            setup=OuterSetup(),
            plan=Plan(job=job, outer_learning_rate=0.7, outer_momentum=0.9, fresh=False),
            backend=cast(Any, InOneProcess(meeting)),
        )
        done = begin_folder(options)
        service = ReplicaService()
        await Training(options, service, service, say).run(done)

    async def train_late() -> None:
        await late.wait()
        await train(names[2])

    async def main() -> None:
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                for name in names[:2]:
                    nursery.start_soon(train, name)
                nursery.start_soon(train_late)

    trio.run(main)
    weights = {(tmp_path / name / "policy" / "model.safetensors").read_bytes() for name in names}
    assert len(weights) == 1
    joined = [event for name, event in told if event["event"] == "joined"]
    assert [event["received"] for event in joined] == [True]
    last = [event for name, event in told if event["event"] == "trained"][-3:]
    assert [(event["step"], event["trainers"]) for event in last] == [(8, 3)] * 3
    for name in names:
        kept = {path.name for path in (tmp_path / name).iterdir()}
        assert kept == {"inner-4", "policy", "progress.json", "state-4"}


@dataclass
class DiesOnce:
    """A backend whose first child dies within an averaging."""

    name: str = "in-process"
    lives: int = 0

    @asynccontextmanager
    async def connect(self, shapes: Shapes, state_bytes: int) -> AsyncIterator[AveragingService]:
        self.lives += 1
        yield (Dying if self.lives == 1 else InProcess)(Meeting(trainers=1), shapes)


class Dying(InProcess):
    async def average(self, job: AverageRound) -> Exchanged:
        if job.round == 2:
            raise ChildDied("child in-process was killed by SIGKILL", "in-process")
        return await super().average(job)


@pytest.mark.slow
def test_a_backend_that_dies_is_started_again_from_the_last_round(tmp_path: Path) -> None:
    job = a_job(tmp_path, "trainer-1", inner_steps=1, rounds=3, compression="fp32")
    events: list[dict[str, Any]] = []
    options = TrainOptions(
        out=tmp_path / "out",
        resume=False,
        setup=OuterSetup(),
        plan=Plan(job=job, outer_learning_rate=1.0, outer_momentum=0.0, fresh=False),
        backend=cast(Any, DiesOnce()),
    )
    trio.run(run_train, options, events.append)
    steps = [event["step"] for event in events if event["event"] == "trained"]
    assert steps == [1, 2, 3]
    (restarted,) = [event for event in events if event["event"] == "restarted"]
    assert restarted["name"] == "in-process"
    assert events[-1]["event"] == "saved"


@pytest.mark.slow
def test_a_training_that_fails_at_its_start_leaves_no_folder(tmp_path: Path) -> None:
    make_policy(tmp_path / "base", seed=3)
    (tmp_path / "text.txt").write_text("a")
    out = tmp_path / "runs" / "first"
    said = swarm_command(
        *("train", "--model", tmp_path / "base", "--data", tmp_path / "text.txt", "--out", out),
        *("--steps", "4", "--inner-steps", "4"),
    )
    assert said.status == 2 and said.errors.startswith("error: "), said.errors
    assert not out.parent.exists()


def test_only_what_a_failure_made_is_removed(tmp_path: Path) -> None:
    for own, keep, remains in ((True, False, True), (False, True, True), (False, False, False)):
        folder = tmp_path / "out"
        if own:
            folder.mkdir()
        with pytest.raises(UserError), removed_on_failure(folder, partial(bool, keep)):
            folder.mkdir(exist_ok=True)
            raise UserError("no")
        assert folder.exists() == remains
        if remains:
            folder.rmdir()
