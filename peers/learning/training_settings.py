"""Settings of all trainers: how the model lies in memory and is computed."""

from typing import Literal

import msgspec
import pydantic

from swarm.errors import UserError
from swarm.events import Events
from swarm.jobs.memory import MemoryPlan, fullest
from swarm.jobs.training import Sharding
from swarm.settings import ComputeSettings
from swarm.terminal.figures import readable_bytes

Attention = Literal["fastest", "flash_attention_2", "flex_attention", "sdpa", "eager"]
"""One of `attention.ATTENTIONS`, or the fastest one that the device can train with."""


class TrainingSettings(ComputeSettings):
    """How this peer trains. With bfloat16 the master weights stay in float32."""

    replicas: int = pydantic.Field(default=1, ge=1)
    tensor_parallel: int = pydantic.Field(default=1, ge=1)
    sequence_parallel: int = pydantic.Field(default=1, ge=1)
    expert_parallel: bool = False
    activation_checkpointing: bool = False
    compile: bool = False
    attention: Attention = "fastest"
    cpu_offload: bool = False
    optimiser: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    pass_tokens: int = pydantic.Field(default=0, ge=0, le=1 << 24)
    memory_check: Literal["refuse", "report"] = "refuse"
    tensorboard: str = ""
    wandb: str = ""

    @property
    def sharding(self) -> Sharding:
        """The policy's layout in memory; `dtype` sets its precision."""
        return self.filled(Sharding)

    def take(self, found: MemoryPlan, events: Events, save_steps: int = 0) -> None:
        """Say what training will hold in memory; raises `UserError` if it does not fit.

        `save_steps`: steps that a crash loses; 0: that is told elsewhere."""
        fields = msgspec.structs.asdict(found)
        del fields["parts"]
        for memory in ("device", "host"):
            fields[f"{memory}_parts"] = [
                f"{part.name} {readable_bytes(part.bytes)}" for part in fullest(found.parts, memory)
            ]
        events.emit("trainer.planned", **fields, save_steps=save_steps)
        if found.problem and self.memory_check == "refuse":
            raise UserError(found.problem)
