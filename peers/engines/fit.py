"""Whether a policy fits the memory of a device, told before its weights are read. Imports no torch.

The figures follow from the config, the sizes of the weight files and the dtype. The cache of a
position is the one of the native engine (`peers.engines.cache.Shape`); vLLM's lacks the hidden
states, so it is a little smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.engines.config import read_supported_config
from peers.engines.families import describe
from swarm.errors import UserError
from swarm.jobs import Hardware

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
STATE_BYTES = 2
"""Bytes of a value of a kept hidden state."""


@dataclass(frozen=True)
class Need:
    """The memory that a policy needs on each device."""

    weights_bytes: int
    stored_bytes: int
    """The same in the dtype of the files."""
    row_bytes: int
    """The cache of one completion of `length` positions."""
    length: int


def need_of(folder: Path, dtype: str, length: int, devices: int = 1) -> Need:
    """The memory that the policy in `folder` needs in `dtype`, shared by that many devices.

    Raises `UserError` for an unsupported model.
    """
    config = read_supported_config(folder)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    stored = ITEM_BYTES.get(stored_dtype(config), ITEM_BYTES[dtype])
    length = min(length, config["max_position_embeddings"])
    return Need(
        weights_bytes=size * ITEM_BYTES[dtype] // stored // devices,
        stored_bytes=size // devices,
        row_bytes=length * position_bytes(config, dtype) // devices,
        length=length,
    )


def devices_of(hardware: Hardware) -> int:
    """Devices, here or in other processes, that share a model."""
    split = len(hardware.devices) or len(hardware.stages) or 1
    return split * hardware.tensor_parallel * hardware.pipeline_parallel


def position_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """Bytes that one position of a completion takes in the cache."""
    model = describe(config)
    values = 2 * len(model.layers) * model.kv_heads * model.head_size
    return values * ITEM_BYTES[dtype] + model.hidden_size * STATE_BYTES


def stored_dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")


def check_fits(need: Need, free_bytes: int, dtype: str, hardware: Hardware, device: str) -> None:
    """Raise `UserError` unless weights and the cache of one completion fit into the free memory.

    The sentence says by how much they do not, and which setting or split would help.
    """
    needed = need.weights_bytes + need.row_bytes
    if needed <= free_bytes:
        return
    saved = need.weights_bytes - need.stored_bytes
    parts = devices_of(hardware)
    if saved and needed - saved <= free_bytes:
        remedy = 'set dtype = "bfloat16" under [inference]'
    elif need.weights_bytes + need.row_bytes // need.length <= free_bytes:
        remedy = "stop other programs, or use a device with more memory"
    elif device.startswith("cuda"):
        wanted = -(-needed * parts // max(1, free_bytes))
        remedy = (
            f"split it over at least {wanted} such GPUs: devices under [inference], or "
            'tensor_parallel with engine = "vllm"'
        )
    else:
        remedy = (
            "stop other programs, use a machine with more memory, or split it over several "
            "processes: stages under [inference]"
        )
    raise UserError(
        f"the policy does not fit into the memory of {device}: its weights take "
        f"{_gigabytes(need.weights_bytes)} GB in {dtype} and the cache of one completion of "
        f"{need.length} tokens {_gigabytes(need.row_bytes)} GB, but {_gigabytes(free_bytes)} GB "
        f"are free, {_gigabytes(needed - free_bytes)} GB too few; {remedy}"
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.3g}" if count < 1e11 else f"{count / 1e9:,.0f}"
