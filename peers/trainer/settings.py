"""What a person may set for one trainer: the table `[trainer]` of its `--config`.

What concerns the run as a whole (objective, batch, schedule) is in its manifest instead.
"""

from __future__ import annotations

from typing import Literal

import pydantic
from pydantic_core import PydanticCustomError

from peers.trainer.alarms import Action, Limits
from swarm.errors import UserError
from swarm.jobs import Sharding
from swarm.settings import ComputeSettings
from swarm.shardcast import limits
from swarm.shardcast.manifest import is_mirror

Attention = Literal["fastest", "flash_attention_2", "flex_attention", "sdpa", "eager"]
"""`packing.ATTENTIONS`, or the fastest of them that the device can train with."""


class TrainerSettings(ComputeSettings):
    """`[trainer]`: how this peer trains. With bfloat16 the master weights stay in float32."""

    model: str = ""
    """Hugging Face folder of the base policy; needed."""
    seed: int = pydantic.Field(default=0, ge=0, lt=2**63)
    """Of the trainer's own choices: how a batch is cut into optimiser steps."""
    prepare_base: bool = False
    """Make the demo's base policy in that folder first: random weights and a short SFT."""
    evaluate: bool = False
    """Evaluate on held-out prompts when the run is over."""
    replicas: int = pydantic.Field(default=1, ge=1)
    """Whole copies of the policy among the ranks (HSDP); each is spread over the ranks it has."""
    activation_checkpointing: bool = False
    """Keep only the layers' inputs, and compute the rest again on the way back."""
    attention: Attention = "fastest"
    """Which attention to compute with, for a device on which the fastest one fails."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimiser in main memory."""
    states_kept: int = pydantic.Field(default=2, ge=1, le=1000)
    """Newest training states kept."""
    states_every: int = pydantic.Field(default=0, ge=0)
    """Beside those, the last three states of steps that this number divides: what a rollback can
    go back to. 0: none, or 10 where `alarm_action` is rollback."""
    mirrors: list[str] = pydantic.Field(default=[], max_length=limits.MIRRORS_MAX)
    """Addresses of web servers or buckets that each published manifest names as sources of the
    policy and its deltas. Upload to them what `swarm checkpoint export` writes."""
    starved_seconds: float = pydantic.Field(default=300.0, gt=0)
    """Seconds without a new accepted rollout after which the trainer revises the step's order, and
    between further revisions. (It says whom it waits for after 30 s.)"""
    alarm_action: Action = "report"
    """What an alarm does: report, pause the run, or go back to the last good state."""
    alarm_gradient_norm: float = pydantic.Field(default=Limits.gradient_norm, gt=1)
    """An alarm rings where the gradient norm is more than this times its median."""
    alarm_clipped_share: float = pydantic.Field(default=Limits.clipped_share, gt=1)
    """An alarm rings where the share of tokens clipped is more than this times its median."""
    alarm_entropy: float = pydantic.Field(default=Limits.entropy, gt=1)
    """An alarm rings where the entropy is more than this times its lowest so far."""
    alarm_reward: float = pydantic.Field(default=Limits.reward, ge=0, lt=1)
    """An alarm rings where the reward falls below this share of its best so far."""
    rollbacks_max: int = pydantic.Field(default=3, ge=0)
    """Rollbacks in one life of the trainer, after which it pauses instead."""
    tensorboard: str = ""
    """Folder for TensorBoard's event files; empty: none."""
    wandb: str = ""
    """Project of Weights & Biases that metrics go to; empty: none."""
    peak_flops: float = pydantic.Field(default=0.0, ge=0)
    """Of one rank's device, in bf16, for the share of it that is used; 0: as its name says."""

    @pydantic.model_validator(mode="after")
    def _has_model(self) -> TrainerSettings:
        if not self.model:
            raise UserError(
                "the trainer needs a base policy: set model under [trainer] in --config to a "
                "Hugging Face folder"
            )
        return self

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
    def limits(self) -> Limits:
        """Of the alarms."""
        return Limits(
            gradient_norm=self.alarm_gradient_norm,
            clipped_share=self.alarm_clipped_share,
            entropy=self.alarm_entropy,
            reward=self.alarm_reward,
        )

    @property
    def sharding(self) -> Sharding:
        """How the policy lies in memory; `dtype` says how precisely it computes."""
        return Sharding(
            replicas=self.replicas,
            activation_checkpointing=self.activation_checkpointing,
            cpu_offload=self.cpu_offload,
        )
