"""The service of `swarm eval`, which plays tasks of environments."""

from typing import Literal, Protocol

import msgspec

from swarm.jobs import Hardware, LoadingJob, TrainingJob
from swarm.wire.manifest import EnvironmentReference, Sampling
from swarm.world import Job, Setup

EVALUATION_START_SECONDS = 300.0
"""Time for a child to import torch on a machine that is busy."""


class EvaluationSetup(Setup, frozen=True, kw_only=True):
    """Raises `UserError` for a missing environment, engine or tokenizer of the checkpoint."""

    folder: str
    """Hugging Face folder of the checkpoint."""
    environments: list[EnvironmentReference]
    allowed: tuple[str, ...] = ()
    """Environments that are built whatever their options: the user chose these."""
    engine: str = "native"
    hardware: Hardware = Hardware()
    niceness: int = 0
    """How far the child's priority is lowered."""


class DrawTasks(LoadingJob, frozen=True, kw_only=True):
    split: Literal["train", "held_out"]
    seed: int
    tasks: int
    """Tasks of each environment; an environment with fewer different ones gives all of them."""
    max_new_tokens: int
    """0: what the context length leaves, but at most 512."""
    stop_ids: list[int]
    """Empty: those that the checkpoint's model names."""


UNUSABLE_SHOWN = 20
"""Unusable rows that are named one by one."""


class RowsRead(msgspec.Struct, kw_only=True):
    """What the rows of an environment's data are good for."""

    rows: int
    unusable: list[str] = []
    """A sentence for each of the first that no task can be made of; it names file and row."""
    unusable_count: int = 0
    faults: int = 0
    """Unusable ones whose data are at fault, whatever the model."""
    tokens_max: int = 0
    """Tokens of the longest usable prompt."""
    seconds: float = 0.0

    def listed(self, environment: str) -> str:
        """How many rows cannot be used, and the first of them, a line each."""
        shown = self.unusable[:UNUSABLE_SHOWN]
        more = self.unusable_count - len(shown)
        head = (
            f"{self.unusable_count:,} of {self.rows:,} rows of {environment} cannot be used, and "
            "are passed over:"
        )
        return "\n  ".join([head, *shown, *([f"and {more:,} more"] if more else [])])


class TasksDrawn(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: str
    """BLAKE3-256 of weights, config and tokenizer, hex."""
    engine: str
    tasks: list[int]
    """Number of tasks by environment."""
    max_new_tokens: int
    stop_ids: list[int]
    rows: list[RowsRead | None] = []
    """By environment; None for one without rows."""


class PlayTasks(Job, frozen=True, kw_only=True):
    """Play samples of tasks that `DrawTasks` has drawn. A row is task · samples + sample."""

    environment: int
    rows: list[int]
    sampling: Sampling
    """Its `group_size` is the number of samples of a task."""
    greedy: bool = False


class NextSamples(TrainingJob, frozen=True, kw_only=True):
    """Play until samples of `PlayTasks` are finished."""


class PromptMessage(msgspec.Struct, frozen=True):
    role: str
    """Empty: the content is a prompt of text, not a message."""
    content: str


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
    turns: list[str]
    """The prompt, then the texts of model and environment in turn."""
    prompt: list[PromptMessage] = []
    """The prompt before it was rendered."""
    problem: str = ""
    """Why it cannot be graded."""

    @property
    def key(self) -> tuple[int, int]:
        """What no two samples of a file share."""
        return self.environment, self.row


class Answer(msgspec.Struct, frozen=True):
    """What a policy answers to a task, for people to read."""

    question: str
    text: str
    reward: float


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """Mean rewards, averaged over the environments by their weights."""

    sampled: float
    """Mean reward when sampling as for the run's rollouts."""
    greedy: float
    """Mean reward when always taking the likeliest token."""
    answers: list[Answer] = []
    """Some of those that were sampled; equal tasks for every policy."""


class EvaluationService(Protocol):
    async def draw(self, job: DrawTasks) -> TasksDrawn:
        """Raises `UserError` for a checkpoint that cannot be loaded or is too short for a task."""

    async def play(self, job: PlayTasks) -> None:
        """Begin; `finished` plays on."""

    async def finished(self, job: NextSamples) -> list[Sample]:
        """The next samples, none after the last. Raises `UserError` if its code fails."""
