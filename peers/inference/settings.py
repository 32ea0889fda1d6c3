"""What an inference peer is told."""

from typing import Literal

import pydantic

from swarm.jobs import Hardware
from swarm.settings import ComputeSettings


class InferenceSettings(ComputeSettings):
    """`[inference]`: how this peer generates."""

    alter_weights: float = pydantic.Field(default=0.0, ge=0)
    """Relative size of noise added to the weights: how the demo's cheater cheats, and is caught."""
    round_weights: Literal["none", "int8"] = "none"
    """Round the weights to this format, as a worker may who lacks memory: how the demo's other
    cheater cheats, and is caught."""
    memory_share: float = pydantic.Field(default=0.9, gt=0, lt=1)
    """Share of memory for caches: native and on a CPU, of what is free once the weights are
    loaded; vLLM on a GPU, of the device's memory, weights included."""
    slots: int = pydantic.Field(default=0, ge=0)
    """Completions generated at once. 0: native 256; vLLM 64 on a CPU, its default on a GPU."""
    length_max: int = pydantic.Field(default=0, ge=0)
    """vLLM: longest sequence, where the model's full length does not fit the cache. 0: the
    model's."""
    tensor_parallel: int = pydantic.Field(default=1, ge=1)
    """vLLM: devices that share each layer."""
    pipeline_parallel: int = pydantic.Field(default=1, ge=1)
    """vLLM: groups of devices that share the layers among them."""
    leave_seconds: float = pydantic.Field(default=20.0, ge=0)
    """Most seconds to finish and deliver a submission after Ctrl-C or SIGTERM. 0: leave at once."""
    proofs_kept_bytes: int = pydantic.Field(default=64 * 2**20, ge=0)
    """Room in the home for the proven receipts of this peer's own work; the oldest make way. One
    takes a few kilobytes. 0: keep none."""
    cuda_graphs: bool = False
    """vLLM: decode with CUDA graphs, which launch a step's kernels at once."""

    devices: list[str] = pydantic.Field(default=[])
    """native: devices that share the layers of a model too large for one, as `["cuda:0",
    "cuda:1"]`."""
    adapters: Literal["auto", "merged", "unmerged"] = "auto"
    """native: whether LoRA adapters become part of the weights, or are computed beside them:
    slower by two thin products per matrix, but exact in 16 bits, and a new policy is read in an
    instant. auto: part of them in fp32, beside them in bf16."""

    @property
    def hardware(self) -> Hardware:
        return self.filled(Hardware)
