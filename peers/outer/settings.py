"""Settings of one of several trainers: the table `[replica]` of its `--config`.

Settings of the whole run (rounds, inner steps, outer and inner optimiser) are in its manifest.
"""

import pydantic

from peers.learning.training_settings import TrainingSettings
from swarm.errors import UserError
from swarm.jobs.outer import Inner
from swarm.wire.manifest import Optimiser


class ReplicaSettings(TrainingSettings):
    """`[replica]`: how this peer takes its inner steps."""

    model: str = ""
    """The model before the first round, the same for every trainer: a Hugging Face folder, a .gguf
    file, or OWNER/NAME[@REVISION] of the hub; required."""
    data: list[str] = pydantic.Field(default=[])
    """This trainer's data: files or folders of text, JSONL or Parquet, or their addresses
    (https://, s3://, gs://, hf://). Trainers may have the same: each trains on other blocks."""
    weights: list[float] = pydantic.Field(default=[])
    """How often each of `data` is drawn, in their order and in any unit; empty: all data are one
    source."""
    sequence_tokens: int = pydantic.Field(default=1024, ge=2, le=1 << 20)
    """Length of a packed sequence."""
    batch_sequences: int = pydantic.Field(default=32, ge=1, le=1 << 20)
    """Sequences of one inner step."""
    z_loss: float = pydantic.Field(default=0.0, ge=0)
    """Coefficient of the max-z-loss, which keeps the logits small; 0: none. Baichuan 2 and
    INTELLECT-1 use 2e-4."""
    validation_sequences: int = pydantic.Field(default=0, ge=0, le=1 << 20)
    """Sequences of the data that are held back, to measure the loss of each outer state; 0: none.
    The same for every trainer of the run."""
    seed: int = pydantic.Field(default=0, ge=0, lt=2**63)
    """Seed of the order of the data; the same for every trainer of the run."""

    @pydantic.model_validator(mode="after")
    def _has_model(self) -> "ReplicaSettings":
        if not self.model:
            raise UserError(
                "the replica needs a model: set model under [replica] in --config to a Hugging "
                "Face folder"
            )
        return self

    def inner(self, optimiser: Optimiser) -> Inner:
        """The inner steps, with the optimiser of the run's manifest."""
        return self.filled(Inner, optimiser=optimiser)
