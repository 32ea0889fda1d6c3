"""Offline filter: measures how often a policy solves tasks, as a child of `swarm dataset filter`.

INTELLECT-2 kept problems that its base model solved in 12.5 % to 50 % of 8 attempts (arXiv
2505.07291, §3.3): other problems teach little at first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path

import blake3

from peers.engines.model import weight_files
from peers.engines.native import NativeEngine
from peers.environments import Renderer, Task
from peers.environments import load as load_environment
from peers.environments.interface import NotGradable, as_text
from peers.environments.prompt_room import PromptRoom, shorter_answers
from peers.environments.renderer import stop_ids_of
from peers.environments.row_check import unusable_rows
from peers.evaluation.accuracy import graded
from peers.evaluation.tasks import with_new_prompts
from swarm.jobs.offline import (
    Attempt,
    DescribePolicy,
    FilterService,
    FilterSetup,
    MeasuredTask,
    MeasureTasks,
    PolicyDescribed,
    TasksMeasured,
)
from swarm.rollouts.seeds import digest, noise_key
from swarm.wire.manifest import Sampling
from swarm.world.tasks import JobThread, in_job_thread


class DatasetService:
    """Implements `FilterService`."""

    def __init__(self, setup: FilterSetup) -> None:
        """Load the policy; raises `UserError`."""
        self._folder = Path(setup.policy)
        self._environment = load_environment(setup.environment, setup.version, setup.options)
        self._renderer = Renderer(self._folder)
        self._engine = NativeEngine(self._folder)
        self._drawn: Iterator[tuple[bytes, Task]] = iter(())
        self._next = (-1, 0, 0)
        """Index, seed and length limit of the task that `_drawn` gives next."""
        self._thread = JobThread()

    @in_job_thread
    def describe(self, job: DescribePolicy) -> PolicyDescribed:
        hasher = blake3.blake3()
        for path in weight_files(self._folder):
            hasher.update_mmap(path)
        return PolicyDescribed(
            policy=hasher.hexdigest(),
            stop_ids=stop_ids_of(self._folder),
            unusable=unusable_rows(self._environment, self._room(job.max_new_tokens)),
        )

    @in_job_thread
    def measure(self, job: MeasureTasks) -> TasksMeasured:
        sampling = Sampling(
            temperature=job.temperature,
            max_new_tokens=job.max_new_tokens,
            stop_ids=job.stop_ids,
            group_size=job.attempts,
            groups_per_submission=1,
        )
        with shorter_answers():
            drawn = self._tasks_from(job)
        indices = range(job.first, job.first + len(drawn))
        seeds, tasks = [seed for seed, _ in drawn], [task for _, task in drawn]
        attempts = self._attempts(tasks, job.first, job.seed, sampling)
        return TasksMeasured(
            rows=[
                MeasuredTask(
                    index=index,
                    seed=each.hex(),
                    prompt=as_text(task.prompt),
                    answer=task.answer,
                    passes=sum(attempt.reward >= 1.0 for attempt in own),
                    problem=next((each.problem for each in own if each.problem), ""),
                    data=dict(task.own.data) if job.responses else {},
                    responses=own if job.responses else [],
                )
                for index, each, task, own in zip(indices, seeds, tasks, attempts, strict=True)
            ]
        )

    def _tasks_from(self, job: MeasureTasks) -> list[tuple[bytes, Task]]:
        """Seeds and tasks from index `first` on, of which no two have one prompt.

        Fewer than wanted where the environment has no other.
        """
        key = (job.first, job.seed, job.max_new_tokens)
        if key != self._next:
            self._drawn = islice(self._draw(job.seed, job.max_new_tokens), job.first, None)
        found = list(islice(self._drawn, job.count))
        self._next = (job.first + len(found), job.seed, job.max_new_tokens)
        return found

    def _draw(self, seed: int, max_new_tokens: int) -> Iterator[tuple[bytes, Task]]:
        seeds = (
            digest("swarm/1/dataset", seed.to_bytes(8, "big"), index.to_bytes(8, "big"))
            for index in count()
        )
        return with_new_prompts(self._environment, seeds, "train", room=self._room(max_new_tokens))

    def _room(self, max_new_tokens: int) -> PromptRoom:
        positions = self._engine.capabilities.length_max
        return PromptRoom.of_policy(self._renderer, positions, max_new_tokens)

    def _attempts(
        self, tasks: Sequence[Task], first: int, seed: int, sampling: Sampling
    ) -> list[list[Attempt]]:
        """The graded attempts at each task, of `sampling.group_size` each.

        An attempt's noise follows from the seed and the task's index, which starts at `first`.
        """
        attempts = sampling.group_size
        played = graded(
            self._engine,
            self._renderer,
            self._environment,
            [task for task in tasks for _ in range(attempts)],
            first * attempts,
            noise_key(digest("swarm/1/dataset-noise", seed.to_bytes(8, "big"))),
            sampling,
        )
        found = [
            Attempt(
                text="".join(turn.text for turn in transcript.turns),
                finished=transcript.finished,
                reward=0.0 if isinstance(grade, NotGradable) else grade.reward,
                problem=str(grade) if isinstance(grade, NotGradable) else "",
            )
            for transcript, grade in played
        ]
        return [found[at : at + attempts] for at in range(0, len(found), attempts)]


_SERVICE: type[FilterService] = DatasetService
