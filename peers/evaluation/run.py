"""Run an evaluation in a child process, and keep each finished sample."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.evaluation.options import Evaluation
from peers.evaluation.samples import EVALUATION, Named, SampleFile, open_samples
from swarm.jobs import Hardware
from swarm.jobs.evaluation import (
    EVALUATION_START_SECONDS,
    DrawTasks,
    EvaluationService,
    EvaluationSetup,
    PlayTasks,
    Sample,
    TasksDrawn,
)
from swarm.wire.manifest import Sampling
from swarm.world import Child, client
from swarm.world.compute import LocalCompute

SERVICE = "peers.evaluation.service:EvaluationService"


async def draw(child: Child, wanted: Evaluation) -> TasksDrawn:
    """Draw the tasks of an evaluation; raises `UserError`."""
    return await client(EvaluationService, child).draw(
        DrawTasks(
            split=wanted.split,
            seed=wanted.seed,
            step=wanted.step,
            tasks=wanted.tasks,
            max_new_tokens=wanted.max_new_tokens,
            stop_ids=wanted.stop_ids,
        )
    )


def play_rows(
    child: Child, wanted: Evaluation, drawn: TasksDrawn, environment: int, rows: Iterable[int]
) -> AbstractAsyncContextManager[AsyncIterator[Sample]]:
    """Play rows of an environment, given by its index: row r is a sample of task r // samples."""
    job = PlayTasks(
        environment=environment,
        rows=list(rows),
        sampling=Sampling(
            temperature=wanted.temperature,
            max_new_tokens=drawn.max_new_tokens,
            stop_ids=drawn.stop_ids,
            group_size=wanted.samples,
        ),
        greedy=wanted.greedy,
        with_prompts=wanted.with_prompts,
    )
    return child.stream("play", job, Sample)


@dataclass(frozen=True)
class Machine:
    """Where the child computes."""

    engine: str
    hardware: Hardware
    interpreter: str | None


@dataclass(frozen=True)
class Progress:
    """Samples finished so far."""

    environment: str
    finished: int
    total: int
    reward: float | None
    """`RunningMean.of_first`, or None."""


@dataclass
class RunningMean:
    """The mean of samples that finish in any order."""

    rewards: dict[int, float]
    """By row; rows are added while this is used."""
    _first: int = 0
    """The first row that is not finished."""
    _earned: float = 0.0

    def of_first(self) -> float | None:
        """The mean of the rows before the first that is not finished; None if there is none.

        Of all that are finished it would be too high: short answers finish first, and are more
        often right.
        """
        while self._first in self.rewards:
            self._earned += self.rewards[self._first]
            self._first += 1
        return self._earned / self._first if self._first else None


@dataclass(frozen=True)
class Measured:
    """All samples of one checkpoint."""

    name: str
    """Name of its folder."""
    drawn: TasksDrawn
    samples: list[list[list[Sample]]]
    """[environments][tasks][samples]"""


async def measure(
    wanted: Evaluation,
    folder: Path,
    out: Path,
    machine: Machine,
    show: Callable[[Progress], None],
    named: Named = EVALUATION,
) -> Measured:
    """Evaluate the checkpoint in an absolute folder, resuming `out`; raises `UserError`.

    `named`: the command and its option that gave `out`.
    """
    setup = EvaluationSetup(
        folder=str(folder),
        environments=wanted.environments,
        allowed=tuple(each.name for each in wanted.environments),
        engine=machine.engine,
        hardware=machine.hardware,
    )
    async with LocalCompute().child(
        SERVICE,
        setup,
        name="evaluation",
        interpreter=machine.interpreter,
        start_deadline_seconds=EVALUATION_START_SECONDS,
    ) as child:
        drawn = await draw(child, wanted)
        for sentence in drawn.unusable:
            print(f"warning: {sentence}", file=sys.stderr)
        with open_samples(out, head_of(wanted, drawn), Sample, named) as file:
            for index in range(len(wanted.environments)):
                await _play(wanted, index, drawn, child, file, show)
            return Measured(folder.name, drawn, _in_order(wanted, drawn, file.samples))


def head_of(wanted: Evaluation, drawn: TasksDrawn) -> dict[str, Any]:
    """All that a sample depends on. More tasks may be evaluated later, with the same head."""
    return {
        "checkpoint": drawn.checkpoint,
        "environments": [
            {"name": each.name, "version": each.version, "options": each.options}
            for each in wanted.environments
        ],
        "split": wanted.split,
        "seed": wanted.seed,
        "step": wanted.step,
        "samples": wanted.samples,
        "temperature": wanted.temperature,
        "greedy": wanted.greedy,
        "max_new_tokens": drawn.max_new_tokens,
        "stop_ids": drawn.stop_ids,
        "engine": drawn.engine,
    }


async def _play(
    wanted: Evaluation,
    index: int,
    drawn: TasksDrawn,
    child: Child,
    file: SampleFile[Sample],
    show: Callable[[Progress], None],
) -> None:
    total = drawn.tasks[index] * wanted.samples
    rewards = {
        each.row: each.reward
        for each in file.samples
        if each.environment == index and each.row < total
    }
    label = wanted.labels[index]

    mean = RunningMean(rewards)

    def report() -> None:
        show(Progress(label, len(rewards), total, mean.of_first()))

    report()
    rows = [row for row in range(total) if row not in rewards]
    if not rows:
        return
    async with play_rows(child, wanted, drawn, index, rows) as samples:
        async for sample in samples:
            file.append(sample)
            rewards[sample.row] = sample.reward
            report()


def _in_order(
    wanted: Evaluation, drawn: TasksDrawn, samples: list[Sample]
) -> list[list[list[Sample]]]:
    by_row = {(each.environment, each.row): each for each in samples}
    return [
        [
            [by_row[index, task * wanted.samples + each] for each in range(wanted.samples)]
            for task in range(tasks)
        ]
        for index, tasks in enumerate(drawn.tasks)
    ]
