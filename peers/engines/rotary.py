"""The rotary embedding: tables of cosines and sines by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from peers.engines.architecture import Architecture


class Rotary:
    """The tables on one device; they grow with the positions used."""

    def __init__(self, frequencies: Tensor, scale: float, dtype: torch.dtype) -> None:
        """`frequencies`: angle per position for each pair of dimensions; `scale` of both tables."""
        self._frequencies = frequencies
        self._scale = scale
        self._dtype = dtype
        self._cos = self._sin = torch.empty(0, 2 * len(frequencies))

    def at(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """(cosines, signed sines) of `positions`, all below `length`: [..., 1, head size]."""
        if length > len(self._cos):
            self._extend(max(length, 2 * len(self._cos)))
        return self._cos[positions].unsqueeze(-2), self._sin[positions].unsqueeze(-2)

    def _extend(self, length: int) -> None:
        positions = torch.arange(length, device=self._frequencies.device).float()
        angles = torch.outer(positions, self._frequencies).repeat(1, 2)
        self._cos = (angles.cos() * self._scale).to(self._dtype)
        self._sin = (angles.sin() * self._scale).to(self._dtype)
        self._sin[:, : len(self._frequencies)].neg_()  # the sign of "rotate half", applied once


def turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [..., heads, head size] by `Rotary.at`."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return torch.addcmul(heads * cos, swapped, sin)


def make_rotary(
    model: Architecture, config: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> Rotary:
    """The rotary embedding of a model, whose config is `config`."""
    if model.rope["rope_type"] == "default":
        exponents = torch.arange(0, model.head_size, 2, dtype=torch.float32) / model.head_size
        return Rotary((1.0 / model.rope["rope_theta"] ** exponents).to(device), 1.0, dtype)
    from transformers import CONFIG_MAPPING
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    loaded = CONFIG_MAPPING[model.family].from_dict(dict(config))
    frequencies, scale = ROPE_INIT_FUNCTIONS[model.rope["rope_type"]](loaded, device)
    return Rotary(frequencies, float(scale), dtype)
