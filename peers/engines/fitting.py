"""Whether a checkpoint fits its config, and a device's memory, found out before it is loaded."""

from __future__ import annotations

from pathlib import Path

import torch

from peers.engines.config import read_supported_config
from peers.engines.device import available_bytes
from peers.engines.ends import Ends
from peers.engines.experts import fuse_experts
from peers.engines.families import Architecture, describe
from peers.engines.layers import Layers
from peers.engines.model import open_weights
from peers.engines.weights import Weights
from swarm.errors import UserError


def check_shapes(model: Architecture, folder: Path) -> None:
    """Raise `UserError` unless the weights in `folder` are those of the model, in names and shapes.

    Reads the files' headers only.
    """
    meta = torch.device("meta")
    _, shapes = open_weights(folder)
    empty = {name: torch.empty(shape, device=meta) for name, shape in shapes.items()}
    weights = Weights(model, fuse_experts(empty), str(folder), meta, None)
    Ends(weights)
    Layers(weights, range(len(model.layers)), {})
    weights.check_all_taken()


def check_fits(
    folder: Path, device: torch.device, dtype: torch.dtype, available: int | None = None
) -> None:
    """Raise `UserError` if a device has too little memory for the weights in `folder`.

    `available`: bytes free on the device; None: as it says itself. Caches need more.
    """
    model = describe(read_supported_config(folder))
    _, shapes = open_weights(folder)
    needed = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    if dtype != torch.float32:  # the head computes in fp32
        needed += model.vocabulary_size * model.hidden_size * 4
    free = available_bytes(device) if available is None else available
    if needed > free:
        raise UserError(
            f"the model in {folder} needs {needed / 1e9:.3g} GB on {device} in "
            f"{str(dtype).removeprefix('torch.')}, which has {free / 1e9:.3g} GB free; split it "
            "with the settings devices or stages, or free some memory"
        )
