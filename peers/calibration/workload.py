"""The work of a submission: prompts, and the reward that a cheat is after."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.engines.config import read_supported_config
from peers.environments import Environment, Renderer, Task, task_of
from peers.environments.episodes import grade_segments
from swarm.errors import UserError
from swarm.rollouts.rollout import Finish, Segment
from swarm.rollouts.seeds import digest, noise_key, task_seed
from swarm.wire.manifest import Sampling

PROMPT_TOKENS = 16
"""Length of a random prompt, where no environment gives prompts."""

DRAWS_MAX = 16
"""Tasks that are tried for one group."""


@dataclass(frozen=True)
class Work:
    """One submission's work; a row is a rollout."""

    seed: bytes
    prompts: list[list[int]]
    """[rows] The rows of a group have the same prompt."""
    rewards: Callable[[int, Sequence[int]], float]
    """(row, completion) → reward."""

    def key(self, attempt: int = 0) -> tuple[int, int]:
        """The key of the submission's noise; another attempt's is not the seed's."""
        seed = self.seed if attempt == 0 else digest("swarm/1/attempt", self.seed, bytes([attempt]))
        return noise_key(seed)


class Workload:
    """Makes the work of a model's submissions from numbers."""

    def __init__(
        self,
        folder: Path,
        sampling: Sampling,
        *environments: Environment | None,
        grades: bool = True,
    ) -> None:
        """Read the model in `folder`.

        Groups take the environments in turn; without any, prompts are random tokens. Without
        `grades` all rewards are 0, and no grader runs.
        """
        self.sampling = sampling
        config = read_supported_config(folder)
        self._vocabulary: int = config["vocab_size"]
        self._positions: int = config["max_position_embeddings"]
        self._environments = [each for each in environments if each is not None]
        self._renderer = Renderer(folder) if self._environments else None
        self._grades = grades

    def work(self, number: int, name: str = "calibration") -> Work:
        """The work of submission `number`."""
        seed = digest("swarm/1/calibration", name.encode(), number.to_bytes(8, "big"))
        groups, size = self.sampling.groups_per_submission, self.sampling.group_size
        renderer = self._renderer
        if renderer is None:
            drawn = random.Random(seed)
            prompts = [
                drawn.choices(range(self._vocabulary), k=PROMPT_TOKENS) for _ in range(groups)
            ]
            rows = [prompts[row // size] for row in range(groups * size)]
            return Work(seed, rows, lambda _, completion: float(sum(completion) % 2))
        drawn_from = [
            self._environments[group % len(self._environments)] for group in range(groups)
        ]
        drawn_tasks = [self._drawn(each, seed, group) for group, each in enumerate(drawn_from)]
        tasks, encoded = [task for task, _ in drawn_tasks], [tokens for _, tokens in drawn_tasks]
        stops = self.sampling.stop_ids

        def reward(row: int, completion: Sequence[int]) -> float:
            if not self._grades:
                return 0.0
            environment = drawn_from[row // size]
            prompt = Segment("prompt", encoded[row // size])
            finish: Finish = "stop" if completion[-1] in stops else "length"
            model = Segment("model", list(completion), finish)
            task = tasks[row // size]
            return grade_segments(environment, task, renderer, (prompt, model), stops).reward

        return Work(seed, [encoded[row // size] for row in range(groups * size)], reward)

    def _drawn(self, environment: Environment, seed: bytes, group: int) -> tuple[Task, list[int]]:
        """A group's task and its prompt, the first that can be rendered and leaves room to answer.

        One bad row of a data set must not end a measurement. Raises `UserError` if all are bad.
        """
        assert self._renderer is not None
        groups, problem = self.sampling.groups_per_submission, ""
        for attempt in range(DRAWS_MAX):
            try:
                task = task_of(environment, task_seed(seed, group + attempt * groups))
                tokens = self._renderer.encode_prompt(task.prompt)
            except UserError as error:
                problem = str(error)
                continue
            if 0 < len(tokens) <= self._positions - self.sampling.max_new_tokens:
                return task, tokens
            problem = f"a prompt of {len(tokens)} tokens"
        raise UserError(
            f"environment {environment.name!r} draws no prompt to measure with in {DRAWS_MAX} "
            f"tries; the last one failed: {problem}"
        )
