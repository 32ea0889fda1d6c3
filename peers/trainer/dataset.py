"""Offline filter: measures how often a policy solves tasks, as a child of `swarm dataset filter`.

INTELLECT-2 kept problems that its base model solved in 12.5 % to 50 % of 8 attempts (arXiv
2505.07291, §3.3): other problems teach little at first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import blake3

from peers.engines.model import weight_files
from peers.engines.native import NativeEngine
from peers.environments import Renderer, Task, task_of
from peers.environments import load as load_environment
from peers.environments.interface import as_text
from peers.evaluation.checkpoint import stop_ids_of
from peers.trainer.evaluation import graded
from swarm.errors import UserError
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
from swarm.manifest import Sampling
from swarm.rollouts.seeds import digest, noise_key
from swarm.world.job_thread import JobThread, in_job_thread


class DatasetService:
    """Implements `FilterService`."""

    def __init__(self, setup: FilterSetup) -> None:
        """Load the policy; raises `UserError`."""
        self._folder = Path(setup.policy)
        self._environment = load_environment(setup.environment, setup.version, setup.options)
        self._renderer = Renderer(self._folder)
        self._engine = NativeEngine(self._folder)
        self._thread = JobThread()

    @in_job_thread
    def describe(self, job: DescribePolicy) -> PolicyDescribed:
        hasher = blake3.blake3()
        for path in weight_files(self._folder):
            hasher.update_mmap(path)
        return PolicyDescribed(policy=hasher.hexdigest(), stop_ids=stop_ids_of(self._folder))

    @in_job_thread
    def measure(self, job: MeasureTasks) -> TasksMeasured:
        sampling = Sampling(
            temperature=job.temperature,
            max_new_tokens=job.max_new_tokens,
            stop_ids=job.stop_ids,
            group_size=job.attempts,
            groups_per_submission=1,
        )
        indices = range(job.first, job.first + job.count)
        seeds = [
            digest("swarm/1/dataset", job.seed.to_bytes(8, "big"), index.to_bytes(8, "big"))
            for index in indices
        ]
        tasks = [task_of(self._environment, each) for each in seeds]
        for task in tasks:
            self._check_length(task, job.max_new_tokens)
        attempts = self._attempts(tasks, job.first, job.seed, sampling)
        return TasksMeasured(
            rows=[
                MeasuredTask(
                    index=index,
                    seed=each.hex(),
                    prompt=as_text(task.prompt),
                    answer=task.answer,
                    passes=sum(attempt.reward >= 1.0 for attempt in own),
                    data=dict(task.own.data) if job.responses else {},
                    responses=own if job.responses else [],
                )
                for index, each, task, own in zip(indices, seeds, tasks, attempts, strict=True)
            ]
        )

    def _check_length(self, task: Task, max_new_tokens: int) -> None:
        """Raise `UserError` unless the policy can hold a task's prompt and a completion."""
        prompt = self._renderer.encode_prompt(task.prompt)
        length_max = self._engine.capabilities.length_max
        if not prompt:
            raise UserError(f"the tokenizer makes no token of the prompt {task.prompt!r}")
        if len(prompt) + max_new_tokens > length_max:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and --max-new-tokens {max_new_tokens} "
                f"exceed the {length_max} positions of the policy; give a "
                "smaller --max-new-tokens"
            )

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
                reward=grade.reward,
            )
            for transcript, grade in played
        ]
        return [found[at : at + attempts] for at in range(0, len(found), attempts)]


_SERVICE: type[FilterService] = DatasetService
