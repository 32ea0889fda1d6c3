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
    """The base policy: a Hugging Face folder, a .gguf file, or OWNER/NAME[@REVISION] of the hub;
    required."""
    teacher: str = ""
    """Teacher of a run with `objective.teacher_weight`, named as `model` is: of any size, with the
    same tokenizer; or an adapter of the base. Empty: the base, if it has `teacher_prompt`."""
    seed: int = pydantic.Field(default=0, ge=0, lt=2**63)
    """Seed of the trainer's own choices: how a batch is split into optimiser steps."""
    save_steps: int = pydantic.Field(default=5, ge=1, le=1000)
    """Steps between training states, and so the most that a crash loses: the trainer repeats them
    from their recorded batches. It keeps the policies that these need, `max_staleness` and as many
    as these steps, if the run's `checkpoints_kept` is less."""
    states_kept: int = pydantic.Field(default=2, ge=1, le=1000)
    """Number of newest training states kept."""
    states_every: int = pydantic.Field(default=0, ge=0)
    """Also keep the last three states of steps that this number divides, as targets of a rollback.
    0: none, or 10 where `alarm_action` is rollback."""
    mirrors: list[str] = pydantic.Field(default=[], max_length=limits.MIRRORS_MAX)
    """Addresses of web servers or buckets that each published manifest names as sources of the
    policy. Upload to them what `swarm checkpoint export` writes."""
    push: str = ""
    """Repository OWNER/NAME of the Hugging Face hub to upload policies to; empty: none. Needs
    HF_TOKEN, or hf auth login."""
    push_steps: int = pydantic.Field(default=50, ge=1)
    """Steps between uploaded policies; the last one of the run always is."""
    starved_seconds: float = pydantic.Field(default=300.0, gt=0)
    """Seconds without a new accepted rollout after which the trainer revises the step's order, and
    between further revisions. (After 30 s it reports whom it waits for.)"""
    alarm_action: Action = "recover"
    """What an alarm does: report only, pause the run, or rollback to the last good state. recover:
    report, and go back once if the reward collapses."""
    alarm_gradient_norm: float = pydantic.Field(default=AlarmLimits.gradient_norm, gt=1)
    """Raise an alarm where the gradient norm is more than this times its median."""
    alarm_clipped_share: float = pydantic.Field(default=AlarmLimits.clipped_share, gt=1)
    """Raise an alarm where the share of clipped tokens is more than this times its median."""
    alarm_entropy: float = pydantic.Field(default=AlarmLimits.entropy, gt=1)
    """Raise an alarm where the entropy is more than this times its lowest so far."""
    alarm_reward: float = pydantic.Field(default=AlarmLimits.reward, ge=0, lt=1)
    """Raise an alarm where the reward falls below this share of its best so far."""
    rollbacks_max: int = pydantic.Field(default=3, ge=0)
    """Rollbacks after which the trainer pauses instead, counted anew when it restarts."""
    peak_flops: float = pydantic.Field(default=0.0, ge=0)
    """Peak FLOP/s of one rank's device, in bf16, to compute its used share; 0: by its name."""

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
