"""What an inference peer is told."""

from typing import Literal

import pydantic

from swarm.jobs import Hardware
from swarm.settings import ComputeSettings


class InferenceSettings(ComputeSettings):
    """`[inference]`: how this peer generates."""

    alter_weights: float = pydantic.Field(default=0.0, ge=0)
    round_weights: Literal["none", "int8"] = "none"
    memory_share: float = pydantic.Field(default=0.9, gt=0, lt=1)
    slots: int = pydantic.Field(default=0, ge=0)
    length_max: int = pydantic.Field(default=0, ge=0)
    tensor_parallel: int = pydantic.Field(default=1, ge=1)
    pipeline_parallel: int = pydantic.Field(default=1, ge=1)
    leave_seconds: float = pydantic.Field(default=20.0, ge=0)
    proofs_kept_bytes: int = pydantic.Field(default=64 * 2**20, ge=0)
    cuda_graphs: bool = False

    devices: list[str] = pydantic.Field(default=[])
    adapters: Literal["auto", "merged", "unmerged"] = "auto"

    @property
    def hardware(self) -> Hardware:
        return self.filled(Hardware)
