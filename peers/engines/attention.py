"""Causal attention, within windows where a layer has one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
from torch import Tensor

BLOCK = 512
"""Queries in one piece where no fused kernel computes the layer: bounds the scores in memory."""


@dataclass(frozen=True)
class LayerAttention:
    """What the function that attends must know about a layer."""

    index: int
    window: int | None = None
    """A token attends to this many tokens, itself included; None: to all before it."""


def unseen(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Whether a query may not attend to a key, bool, for positions that broadcast together."""
    later = key > query
    return later if window is None else later | (key <= query - window)


def attend_causally(layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every token attends to itself and those before it, within the layer's window."""
    length, window = query.shape[2], layer.window
    if window is None or window >= length:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attend_further(layer, query, key, value, 0)


def attend_further(
    layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor, past: int
) -> Tensor:
    """Causal attention of queries [B, H, S, D] to keys and values [B, H_kv, `past` + S, D]."""
    length, window = query.shape[2], layer.window
    positions = torch.arange(past + length, device=query.device)
    pieces = []
    for start in range(0, length, BLOCK):
        rows = slice(start, min(start + BLOCK, length))
        first = 0 if window is None else max(0, past + start - window + 1)
        seen = slice(first, past + rows.stop)
        blocked = unseen(positions[past + start : seen.stop, None], positions[seen], window)
        given = (query[:, :, rows], key[:, :, seen], value[:, :, seen])
        pieces.append(F.scaled_dot_product_attention(*given, attn_mask=~blocked, enable_gqa=True))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
