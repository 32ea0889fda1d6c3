"""Settings of one trainer: the table `[trainer]` of its `--config`.

Settings of the whole run (objective, batch, schedule) are in its manifest instead."""

from typing import Self

import pydantic
from pydantic_core import PydanticCustomError

from peers.evaluation.settings import EvaluationSettings
from peers.learning.training_settings import TrainingSettings
from peers.models.find import is_hub_name
from peers.trainer.collapse import Action, AlarmLimits
from swarm.errors import UserError
from swarm.shardcast import limits
from swarm.shardcast.manifest import is_mirror


class TrainerSettings(TrainingSettings, EvaluationSettings):
    """`[trainer]`: how this peer trains. With bfloat16 the master weights stay in float32."""

    model: str = ""
    teacher: str = ""
    seed: int = pydantic.Field(default=0, ge=0, lt=2**63)
    save_steps: int = pydantic.Field(default=5, ge=1, le=1000)
    states_kept: int = pydantic.Field(default=2, ge=1, le=1000)
    states_every: int = pydantic.Field(default=0, ge=0)
    mirrors: list[str] = pydantic.Field(default=[], max_length=limits.MIRRORS_MAX)
    push: str = ""
    push_steps: int = pydantic.Field(default=50, ge=1)
    starved_seconds: float = pydantic.Field(default=300.0, gt=0)
    alarm_action: Action = "recover"
    alarm_gradient_norm: float = pydantic.Field(default=AlarmLimits.gradient_norm, gt=1)
    alarm_clipped_share: float = pydantic.Field(default=AlarmLimits.clipped_share, gt=1)
    alarm_entropy: float = pydantic.Field(default=AlarmLimits.entropy, gt=1)
    alarm_reward: float = pydantic.Field(default=AlarmLimits.reward, ge=0, lt=1)
    rollbacks_max: int = pydantic.Field(default=3, ge=0)
    peak_flops: float = pydantic.Field(default=0.0, ge=0)

    @pydantic.model_validator(mode="after")
    def _has_model(self) -> Self:
        if not self.model:
            raise UserError(
                "the trainer needs a base policy: set model under [trainer] in --config to a "
                "Hugging Face folder"
            )
        return self

    @pydantic.field_validator("push")
    @classmethod
    def _is_repository(cls, name: str) -> str:
        if name and not is_hub_name(name):
            raise PydanticCustomError("repository", "it must be OWNER/NAME, as on the hub")
        return name

    @pydantic.field_validator("mirrors")
    @classmethod
    def _are_mirrors(cls, mirrors: list[str]) -> list[str]:
        if not all(is_mirror(mirror) for mirror in mirrors):
            raise PydanticCustomError(
                "mirror",
                "each must be an http:// or https:// address without user, query or fragment",
            )
        return mirrors

    @property
    def limits(self) -> AlarmLimits:
        """Thresholds of the alarms."""
        return AlarmLimits(
            gradient_norm=self.alarm_gradient_norm,
            clipped_share=self.alarm_clipped_share,
            entropy=self.alarm_entropy,
            reward=self.alarm_reward,
        )
