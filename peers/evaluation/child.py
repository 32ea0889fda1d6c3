"""The child process that draws tasks and plays them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager

from peers.evaluation.options import Evaluation
from swarm.jobs.evaluation import DrawTasks, EvaluationService, PlayTasks, Sample, TasksDrawn
from swarm.wire.manifest import Sampling
from swarm.world import Child, client

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
