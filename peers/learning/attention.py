"""Attention of packed rows: which kernels can do it, and what keeps sequences apart."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from peers.engines.architecture import FULL, SLIDING, describe, is_described
from peers.engines.loading import caps_scores
from peers.learning.packing import Rows

ATTENTIONS = ("flash_attention_2", "flex_attention", "sdpa", "eager")
"""Attention implementations for packed rows, by their names in transformers, fastest first. The
first two skip the masked blocks; the others compute and mask them."""


def fastest_attention(model: Any, device: torch.device, half_precision: bool = False) -> str:
    """The first of `ATTENTIONS` that a model can be trained with on a device."""
    knows = {
        "flash_attention_2": model._supports_flash_attn,
        "flex_attention": bool(windows_of(model.config)),
        "sdpa": model._supports_sdpa and not caps_scores(model.config),
        "eager": True,
    }
    return next(
        each for each in ATTENTIONS if knows[each] and not why_not(each, device, half_precision)
    )


def windows_of(config: Any) -> dict[str, int | None]:
    """The window of each kind of layer, where the model is described; else none is known."""
    known = config.to_dict()
    if not is_described(known):
        return {}
    return {FULL if each is None else SLIDING: each for each in describe(known).windows}


def why_not(attention: str, device: torch.device, half_precision: bool = False) -> str:
    """Why none of `ATTENTIONS` trains on a device; empty: one does. `half_precision`: 16 bits."""
    if attention in ("eager", "sdpa"):
        return ""
    if device.type != "cuda":
        return f"{attention} has no backward pass on a {device.type}"
    if attention == "flash_attention_2":
        from transformers.utils import is_flash_attn_2_available

        if not half_precision:
            return f"{attention} computes in 16 bits only"
        if not is_flash_attn_2_available():
            return f"{attention} needs the package flash-attn, at least 2.3.3"
    return ""


def attention_arguments(
    implementation: str, rows: Rows, windows: Mapping[str, int | None]
) -> dict[str, Any]:
    """Arguments of a transformers model that keep sequences apart with this attention.

    `windows`: those of `windows_of`, from which the masks are made here. If none are known,
    transformers makes the masks from positions that begin anew, and asks the device for it."""
    if not rows.packed:
        return {}  # one sequence per row, then padding: plain causal attention
    arguments: dict[str, Any] = {"position_ids": rows.positions}
    if implementation.startswith("flash_attention"):
        # The model itself passes its windows to this kernel.
        return arguments | kernel_arguments(implementation, rows)
    masks = {kind: _mask(implementation, rows, window) for kind, window in windows.items()}
    if masks:  # only models whose layers differ take a mask for each kind of layer
        arguments["attention_mask"] = masks if len(masks) > 1 else next(iter(masks.values()))
    return arguments


def kernel_arguments(implementation: str, rows: Rows, window: int | None = None) -> dict[str, Any]:
    """Arguments of an attention function itself, for a layer with this window."""
    found: dict[str, Any] = {"attention_mask": None}
    if implementation.startswith("flash_attention"):
        if rows.packed and len(rows.tokens) != 1:
            raise ValueError("flash attention takes packed sequences in a single row")
        if rows.packed:
            found |= {"cu_seq_lens_q": rows.starts, "cu_seq_lens_k": rows.starts}
            found |= {"max_length_q": rows.longest, "max_length_k": rows.longest}
        return found
    narrow = window is not None and window < rows.tokens.shape[1]
    if rows.packed or narrow or implementation != "sdpa":  # which is causal without a mask
        found["attention_mask"] = _mask(implementation, rows, window)
    return found


def _mask(implementation: str, rows: Rows, window: int | None) -> Any:
    if implementation == "flex_attention":
        return flex_mask(rows, window)
    mask = block_mask(rows, window)
    if implementation != "eager":
        return mask
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, lowest)


def block_mask(rows: Rows, window: int | None = None) -> Tensor:
    """Attention mask, bool [R, 1, S, S]: true where a query (dim 2) may see a key (dim 3).

    A token sees itself and the earlier tokens of its own sequence, with a window only that many
    tokens. Padding sees padding, so that no softmax is empty."""
    width = rows.tokens.shape[1]
    same = rows.sequence[:, :, None] == rows.sequence[:, None, :]
    seen = torch.ones(width, width, dtype=torch.bool, device=same.device).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    return (same & seen)[:, None]


def flex_mask(rows: Rows, window: int | None = None) -> Any:
    """The same mask as `block_mask`, as flex attention's sparse blocks."""
    from torch.nn.attention.flex_attention import create_block_mask

    sequence = rows.sequence
    count, width = sequence.shape

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = query >= key if window is None else (query >= key) & (query - key < window)
        return near & (sequence[row, query] == sequence[row, key])

    return create_block_mask(
        visible, B=count, H=None, Q_LEN=width, KV_LEN=width, device=sequence.device.type
    )
