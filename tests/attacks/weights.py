"""Changed copies of a model's weights: what a cheat may load instead of the policy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from peers.engines.model import read_weights
from peers.engines.stored import save_tensors

Change = Callable[[str, Tensor], Tensor]
"""(name, weight in fp32) → weight."""

INT4_GROUP = 32
"""Weights that share a scale."""

LAYER = re.compile(r"\.layers\.(\d+)\.")


def write_changed(folder: Path, target: Path, change: Change) -> Path:
    """Write the model in `folder` with changed weights to `target`; returns it."""
    target.mkdir(parents=True, exist_ok=True)
    changed = {
        name: change(name, weight.float()).to(weight.dtype).contiguous()
        for name, weight in read_weights(folder).items()
    }
    save_tensors(changed, target / "model.safetensors")
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


def fp8(_: str, weight: Tensor) -> Tensor:
    """Matrices rounded to float8 e4m3, one scale per matrix."""
    if weight.dim() < 2:
        return weight
    scale = weight.abs().max().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def int8(_: str, weight: Tensor) -> Tensor:
    """Matrices rounded to 8-bit integers, one scale per row."""
    return weight if weight.dim() < 2 else _rounded(weight, 127)


def int4(_: str, weight: Tensor) -> Tensor:
    """Matrices rounded to 4-bit integers, one scale per group of `INT4_GROUP`."""
    if weight.dim() < 2 or weight.shape[1] % INT4_GROUP:
        return weight
    return _rounded(weight.reshape(-1, INT4_GROUP), 7).reshape(weight.shape)


def _rounded(rows: Tensor, largest: int) -> Tensor:
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / largest
    return (rows / scale).round() * scale


def one_layer(size: float) -> Change:
    """The matrices of layer 0 multiplied by 1 + `size`."""

    def change(name: str, weight: Tensor) -> Tensor:
        layer = LAYER.search(name)
        first = layer is not None and layer[1] == "0" and weight.dim() > 1
        return weight * (1 + size) if first else weight

    return change


def noisy(size: float) -> Change:
    """Gaussian noise on every weight, of `size` relative to its tensor's norm."""
    generator = torch.Generator().manual_seed(0)

    def change(_: str, weight: Tensor) -> Tensor:
        scale = size * float(weight.norm()) / math.sqrt(weight.numel())
        return weight + torch.randn(weight.shape, generator=generator) * scale

    return change
