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
    """Whole copies of the policy among the ranks (HSDP); each copy is sharded over its ranks."""
    tensor_parallel: int = pydantic.Field(default=1, ge=1)
    """Neighbouring ranks over which each layer's matrices are divided; they compute the same
    sequences. For models whose layers are too large for one device; choose the GPUs of a node."""
    sequence_parallel: int = pydantic.Field(default=1, ge=1)
    """Neighbouring ranks that share the tokens of every sequence, and exchange them for heads
    around attention. For sequences whose activations are too large for one device."""
    expert_parallel: bool = False
    """Of a mixture of experts: each rank of a copy keeps its own experts of every layer, and tokens
    travel to them, so that experts are never gathered."""
    activation_checkpointing: bool = False
    """Keep only the layers' inputs, and compute the rest again in the backward pass."""
    compile: bool = False
    """Compile the layers with torch.compile. Off: INTELLECT-2's authors saw it end in a late
    collapse."""
    attention: Attention = "fastest"
    """Attention implementation; set it for a device on which the fastest one fails."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimiser in main memory."""
    optimiser: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """adamw keeps AdamW's moments in float32 (8 bytes per parameter), adamw8bit in 8 bits (2 bytes;
    needs the extra `adamw8bit`). muon steps the layers' matrices by an orthogonalised momentum (4
    bytes) at AdamW's learning rates, and all else by AdamW."""
    pass_tokens: int = pydantic.Field(default=0, ge=0, le=1 << 24)
    """Most tokens in one forward pass; fewer take less memory. A longer sequence has a pass of its
    own. 0: what the memory allows, at most 16,384."""
    memory_check: Literal["refuse", "report"] = "refuse"
    """Whether the trainer stops if the plan of the memory does not fit, or only says so."""
    tensorboard: str = ""
    """Folder for TensorBoard's event files; empty: none."""
    wandb: str = ""
    """Project of Weights & Biases for metrics; empty: none."""

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
