"""Settings of one of several trainers: the table `[replica]` of its `--config`.

Settings of the whole run (rounds, inner steps, outer and inner optimiser) are in its manifest."""

import pydantic

from peers.learning.training_settings import TrainingSettings
from swarm.errors import UserError
from swarm.jobs.outer import Inner
from swarm.wire.manifest import Optimiser


class ReplicaSettings(TrainingSettings):
    """`[replica]`: how this peer takes its inner steps."""

    model: str = ""
    data: list[str] = pydantic.Field(default=[])
    weights: list[float] = pydantic.Field(default=[])
    sequence_tokens: int = pydantic.Field(default=1024, ge=2, le=1 << 20)
    batch_sequences: int = pydantic.Field(default=32, ge=1, le=1 << 20)
    z_loss: float = pydantic.Field(default=0.0, ge=0)
    validation_sequences: int = pydantic.Field(default=0, ge=0, le=1 << 20)
    seed: int = pydantic.Field(default=0, ge=0, lt=2**63)

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
