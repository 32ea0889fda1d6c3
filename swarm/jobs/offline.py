"""Jobs of fine-tuning, which needs no network."""

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from swarm.jobs import LoadingJob, SavingJob, TrainingJob
from swarm.jobs.training import Export
from swarm.wire.manifest import EnvironmentReference

TUNING_START_SECONDS = 300.0
"""Time for a child to import torch on a machine that is busy."""


class TuningSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of fine-tuning."""

    loss: Literal["answers", "preferences"] = "answers"
    """answers: learn each example's answer (SFT). preferences: prefer one of two answers (DPO)."""
    steps: int = 100
    batch: int = 32
    """Examples, or pairs, per step."""
    learning_rate: float | None = None
    """None: by the width of the model."""
    warmup_steps: int = 10
    final_learning_rate_share: float = 0.1
    """Learning rate at the end of the cosine decay, as a share of `learning_rate`."""
    gradient_norm_max: float = 1.0
    validation_share: float = 0.05
    """Share of the examples that is held back for validation and never trained on."""
    validation_examples_max: int = 256
    tokens_max: int = 8192
    """Longest example; a longer one is left out and counted."""
    beta: float = 0.1
    """DPO: how strongly the policy is held to the one that it began as."""
    answer_weight: float = 0.0
    """DPO: weight of the chosen answer's own loss, in nats per token."""
    seed: int = 0


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How the rows of a data set become examples."""

    split: str | None = None
    """Of a folder with several splits; None: train."""
    subset: str | None = None
    """Of several data sets in one folder, that in this folder; `*`: all."""
    where: dict[str, Any] = {}
    """Conditions on columns; only rows that meet all of them are read."""
    prompt_column: str = "prompt"
    """A column, or a text with columns in braces."""
    answer_column: str = "answer"
    chat: bool = False
    """A prompt of text is a message of the user, for the model's chat template."""
    reward: tuple[float, float] = (-math.inf, math.inf)
    """Least and largest reward of exported rollouts to learn from."""


class StartTuning(LoadingJob, frozen=True, kw_only=True):
    """Load a Hugging Face folder and the examples, from a file or an environment."""

    model: str
    settings: TuningSettings
    data: Sequence[str] = ()
    """Files, folders or addresses. Empty: the environment's tasks with their answers."""
    weights: Sequence[float] = ()
    """How often each of the data is drawn; empty: they are one source."""
    reading: Reading = Reading()
    environment: EnvironmentReference | None = None
    state: str = ""
    """Folder of an interrupted tuning's state, for an exact resume; empty: begin."""


class TuningStarted(msgspec.Struct, frozen=True, kw_only=True):
    examples: int
    held_back: int
    """Number of examples for validation."""
    left_out: int
    """Number of examples that are too long or have no prompt."""
    parameters: int
    learning_rate: float
    """The highest."""
    steps_done: int = 0
    """Steps that the resumed state holds."""


class Tune(TrainingJob, frozen=True, kw_only=True):
    """Take one optimiser step."""


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    loss: float
    """Answers: nats per answer token. Preferences: nats per pair."""
    gradient_norm: float
    learning_rate: float
    tokens: int
    skipped: bool
    """Whether the loss or the gradient was not finite, so that the weights did not change."""


class Validate(TrainingJob, frozen=True, kw_only=True):
    """Measure the policy on the examples held back."""


class Validated(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Means over the examples held back; None if there are none."""

    loss: float | None = None
    """As in `Tuned`."""
    answer_probability: float | None = None
    """Answers: probability that a sample at temperature 1 is the answer, to its last token."""
    preferred: float | None = None
    """Preferences: share of the pairs whose chosen answer gained more than the rejected one."""
    margin: float | None = None
    """Preferences: how much more the chosen answer gained, in nats."""


class SaveState(SavingJob, frozen=True, kw_only=True):
    """Write weights, optimiser state and progress, durably, for `StartTuning.state`."""

    folder: str


class TuningService(Protocol):
    """Fine-tunes one policy."""

    async def start(self, job: StartTuning) -> TuningStarted:
        """Load model and examples; raises `UserError` if they or the settings are unusable."""

    async def step(self, job: Tune) -> Tuned: ...

    async def validate(self, job: Validate) -> Validated: ...

    async def save_state(self, job: SaveState) -> None: ...

    async def save(self, job: Export) -> None: ...
