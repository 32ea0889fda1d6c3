"""The services of `swarm eval`: one plays tasks of environments, one runs lm-eval's tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import ClassVar, Literal, Protocol

import msgspec

from swarm.jobs import LOAD_PATIENCE_SECONDS, Hardware
from swarm.jobs.training import TRAINING_PATIENCE_SECONDS
from swarm.wire.manifest import EnvironmentReference, Sampling
from swarm.world import Job, Setup

EVALUATION_START_SECONDS = 300.0
"""Time for a child to import torch, and lm-eval's forty packages, on a machine that is busy."""


class EvaluationSetup(Setup, frozen=True, kw_only=True):
    """Raises `UserError` for an environment or an engine that is not installed, and for a
    checkpoint without a tokenizer."""

    folder: str
    """Hugging Face folder of the checkpoint."""
    environments: list[EnvironmentReference]
    allowed: tuple[str, ...] = ()
    """Environments that are built whatever their options: the user chose these."""
    engine: str = "native"
    hardware: Hardware = Hardware()
    niceness: int = 0
    """How far the child's priority is lowered."""


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
    unusable: list[str] = []
    """Names the rows that no sample can be made of, a sentence for each such environment."""


class PlayTasks(Job, frozen=True, kw_only=True):
    """Play samples of tasks that `DrawTasks` has drawn. A row is task · samples + sample."""

    patience_seconds: ClassVar[float] = TRAINING_PATIENCE_SECONDS

    environment: int
    """Index of the environment."""
    rows: list[int]
    sampling: Sampling
    """Its `group_size` is the number of samples of a task."""
    greedy: bool = False
    with_prompts: bool = False
    """Whether each sample has its task's prompt before it was rendered. One that cannot be graded
    then has a `problem`, instead of ending the job."""


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
    """The model's tokens."""
    turns: list[str]
    """The prompt, then the texts of model and environment in turn."""
    prompt: list[PromptMessage] = []
    """The prompt before it was rendered; empty unless it was asked for."""
    problem: str = ""
    """Why it cannot be graded."""

    @property
    def key(self) -> tuple[int, int]:
        """What no two samples of a file share."""
        return self.environment, self.row


class EvaluationService(Protocol):
    """Evaluates one checkpoint."""

    async def draw(self, job: DrawTasks) -> TasksDrawn:
        """Raises `UserError` for a checkpoint that cannot be loaded or is too short for a task."""
        ...

    def play(self, job: PlayTasks) -> AsyncIterator[Sample]:
        """Raises `UserError` for an environment whose code fails."""
        ...


# --- tasks of lm-eval --------------------------------------------------------------------------


class HarnessSetup(Setup, frozen=True, kw_only=True):
    """Raises `UserError` where lm-eval is not installed, and as `EvaluationSetup`."""

    folder: str
    """Hugging Face folder of the checkpoint."""
    engine: str = "native"
    hardware: Hardware = Hardware()


class RunHarness(Job, frozen=True, kw_only=True):
    """Evaluate lm-eval's tasks, with data of this machine only."""

    patience_seconds: ClassVar[float] = TRAINING_PATIENCE_SECONDS

    tasks: list[str]
    include: str
    """Folder with task files (YAML) beside lm-eval's own; empty: none."""
    limit: int
    """Most documents of each task."""
    chat: bool = False
    """Whether the checkpoint's chat template renders the prompts."""
    out: str
    """File of answers; an existing one is resumed."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's answer to one request of lm-eval."""

    key: str
    """BLAKE3-256 of the request, hex."""
    log_probability: float = 0.0
    is_greedy: bool = False
    text: str = ""


class HarnessFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of a task, as lm-eval computes it."""

    task: str
    metric: str
    """Its name, and its filter where that is not `none`: `exact_match,strict`."""
    value: float
    standard_error: float | None
    """None where lm-eval gives none."""
    documents: int


class HarnessDone(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: str
    engine: str
    figures: list[HarnessFigure]


class AskHarnessProgress(Job, frozen=True, kw_only=True):
    """Ask how far a running `RunHarness` is."""

    patience_seconds: ClassVar[float] = 60.0


class HarnessProgress(msgspec.Struct, frozen=True, kw_only=True):
    finished: int
    """Requests of the current kind answered."""
    total: int


class HarnessService(Protocol):
    """Runs lm-eval on one checkpoint."""

    async def evaluate(self, job: RunHarness) -> HarnessDone:
        """Raises `UserError` for an unknown task, and for one whose data is not here."""
        ...

    async def progress(self, job: AskHarnessProgress) -> HarnessProgress: ...
