"""The memory that a policy needs on a device, and whether it fits, before its weights are read.

The figures follow from the config, the headers of the weight files and the dtype; they are those of
our engines. vLLM's cache lacks the hidden states, so it is a little smaller."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from peers.engines.architecture import Architecture, describe, is_described
from peers.engines.cache import Shape
from peers.engines.config import read_config, read_text_config
from peers.engines.device import find_device, find_dtype
from peers.engines.model import STORED, open_weights
from peers.engines.projection import widens
from swarm.errors import UserError
from swarm.jobs import Hardware
from swarm.terminal.figures import readable_bytes

HEAD_BYTES = 4
"""Bytes of a weight of the head, which computes in fp32."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """The memory that a policy needs on each of the devices that share it."""

    device: str
    dtype: str
    weights_bytes: int
    length: int = 0
    """Positions of the longest completion; 0 where none is generated."""
    row_bytes: int = 0
    """The cache of one completion of `length` positions."""


def need_of(folder: Path, hardware: Hardware, length: int = 0) -> Need:
    """The memory that a policy needs for completions of `length` positions; raises `UserError`."""
    device = find_device(hardware.device)
    dtype = find_dtype(hardware.dtype, device)
    config = read_text_config(folder)
    if is_described(read_config(folder)):
        model = describe(config)
        _, shapes = open_weights(folder, lambda name: name != "lm_head.weight")
        weights = _weights_bytes(model, sum(map(prod, shapes.values())), dtype, device)
        if widens(dtype, device):
            weights += sum(2 * prod(shape) for name, shape in shapes.items() if _is_packed(name))
        position = Shape.of(model, dtype, [device] * len(model.windows)).position_bytes
    else:
        _, shapes = open_weights(folder, stored=STORED | {"I64"})
        head = HEAD_BYTES * config["vocab_size"] * config["hidden_size"]  # a copy
        weights = sum(map(prod, shapes.values())) * dtype.itemsize + head
        position = position_bytes(config, dtype)
    parts = max(1, len(hardware.devices)) * hardware.tensor_parallel * hardware.pipeline_parallel
    length = min(length, config["max_position_embeddings"])
    return Need(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=weights // parts,
        length=length,
        row_bytes=length * position // parts,
    )


def position_bytes(config: Mapping[str, Any], dtype: torch.dtype) -> int:
    """At most the bytes of a position in the caches of a model that is not described."""
    hidden, heads = config["hidden_size"], config.get("num_attention_heads")
    width, shared = config.get("head_dim"), config.get("num_key_value_heads")
    across = hidden
    if isinstance(heads, int) and heads > 0:  # other families have one number for each layer
        width = width if isinstance(width, int) else hidden // heads
        across = width * (shared if isinstance(shared, int) else heads)
    return int(2 * config["num_hidden_layers"] * max(1, across) * dtype.itemsize)


def _weights_bytes(
    model: Architecture, elements: int, dtype: torch.dtype, device: torch.device
) -> int:
    # On a CPU the head has a layout of its own (`packed`), so a tied one is a copy.
    shared = model.tied and dtype == torch.float32 and device.type != "cpu"
    head = 0 if shared else HEAD_BYTES * model.vocabulary_size * model.hidden_size
    return elements * dtype.itemsize + head


def _is_packed(name: str) -> bool:
    return name.endswith("_proj.weight") and ".experts." not in name


def check_fits(need: Need, free_bytes: int) -> None:
    """Raise `UserError` unless weights and one completion's cache fit into the free memory."""
    needed = need.weights_bytes + need.row_bytes
    if needed <= free_bytes:
        return
    cache = ""
    if need.length:
        cache = (
            f" and the cache of one completion of {need.length} tokens "
            f"{readable_bytes(need.row_bytes)}"
        )
    raise UserError(
        f"the policy does not fit into the memory of {need.device}: its weights take "
        f"{readable_bytes(need.weights_bytes)} in {need.dtype}{cache}, but "
        f"{readable_bytes(free_bytes)} are free, {readable_bytes(needed - free_bytes)} too few; "
        "stop other programs, use a "
        'device with more memory or (if that is half as much) dtype = "bfloat16", or split the '
        "policy (setting devices, or tensor_parallel of vLLM)"
    )
