"""The service of `swarm eval`: it plays tasks of a split with one checkpoint and grades them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import ClassVar, Literal, Protocol

import msgspec

from swarm.jobs import LOAD_PATIENCE_SECONDS, Hardware
from swarm.jobs.training import TRAINING_PATIENCE_SECONDS
from swarm.manifest import EnvironmentReference, Sampling
from swarm.world import Job, Setup


class EvaluationSetup(Setup, frozen=True, kw_only=True):
    """Raises `UserError` for an environment or an engine that is not installed, and for a
    checkpoint without a tokenizer."""

    folder: str
    """Hugging Face folder of the checkpoint."""
    environments: list[EnvironmentReference]
    engine: str = "native"
    hardware: Hardware = Hardware()


class DrawTasks(Job, frozen=True, kw_only=True):
    """Load the checkpoint, and draw the tasks of each environment."""

    patience_seconds: ClassVar[float] = LOAD_PATIENCE_SECONDS

    split: Literal["train", "held_out"]
    seed: int
    tasks: int
    """Tasks of each environment; an environment with fewer different ones gives all of them."""
    step: int = 0
    """Rollout step for which curricula draw their tasks."""
    max_new_tokens: int
    """0: what the context length leaves, but at most 512."""
    stop_ids: list[int]
    """Empty: those that the checkpoint's model names."""


class TasksDrawn(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: str
    """BLAKE3-256 of weights, config and tokenizer, hex."""
    engine: str
    """The engine's class."""
    tasks: list[int]
    """Number of tasks by environment."""
    max_new_tokens: int
    stop_ids: list[int]


class PlayTasks(Job, frozen=True, kw_only=True):
    """Play samples of tasks that `DrawTasks` has drawn. A row is task · samples + sample."""

    patience_seconds: ClassVar[float] = TRAINING_PATIENCE_SECONDS

    environment: int
    """Index of the environment."""
    rows: list[int]
    sampling: Sampling
    """Its `group_size` is the number of samples of a task."""
    greedy: bool = False


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A finished and graded sample. Samples finish in any order."""

    environment: int
    row: int
    reward: float
    parts: dict[str, float] = {}
    """What the reward is made of, where the environment says so."""
    finished: bool
    """Whether it ended with a stop token rather than at the length limit."""
    tokens: int
    """The model's tokens."""
    turns: list[str]
    """The prompt, then the texts of model and environment in turn."""


class EvaluationService(Protocol):
    """Evaluates one checkpoint."""

    async def draw(self, job: DrawTasks) -> TasksDrawn:
        """Raises `UserError` for a checkpoint that cannot be loaded or is too short for a task."""
        ...

    def play(self, job: PlayTasks) -> AsyncIterator[Sample]:
        """Raises `UserError` for an environment whose code fails."""
        ...
