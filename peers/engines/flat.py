"""Attention over a flat batch: rows that decode one token, and chunks of several tokens.

The tokens of all rows lie in one dimension, so that the layers' matrix products see one batch,
whatever mixture of prompts and decoding rows it holds. Only attention tells the rows apart."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
from torch import Tensor

from peers.engines.cache import Bucket
from peers.engines.device import upload
from peers.engines.layers import LayerAttention, attend_causally, attend_further, unseen


@dataclass(frozen=True)
class Fresh:
    """Successive chunks of equal length that begin their sequences."""

    first: int
    """Index of the first token in the flat batch."""
    count: int
    length: int


@dataclass(frozen=True)
class Further:
    """A chunk whose sequence has cached positions before it."""

    first: int
    length: int
    row: int
    """The sequence's index in the bucket."""
    past: int
    """Positions before the chunk."""


@dataclass
class Part:
    """The rows of one bucket: first those that decode, then the chunks."""

    bucket: Bucket[Any]
    first: int
    rows: list[int]
    """Per token: its row's index in the bucket."""
    positions: list[int]
    """Per token: its position in its sequence."""
    decoding: int
    """Number of decoding rows, which are the bucket's first rows and the part's first tokens."""
    fresh: list[Fresh] = field(default_factory=list)
    further: list[Further] = field(default_factory=list)


class FlatAttention:
    """Writes a flat batch's keys and values to the cache, and attends."""

    def __init__(self, parts: Sequence[Part], kv_heads: int, dtype: torch.dtype) -> None:
        self._parts, self._kv_heads, self._dtype = parts, kv_heads, dtype
        self._ready: dict[torch.device, list[_Ready]] = {}

    def __call__(self, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries [1, H, T, D], keys and values [1, H_kv, T, D] → [1, H, T, D]."""
        queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
        parts = self._on(query.device)
        if len(parts) == 1 and parts[0].only_decodes:
            mixed = parts[0].decode(layer, queries, keys, values)
        else:
            mixed = torch.empty_like(queries, memory_format=torch.contiguous_format)
            for part in parts:
                part.attend(layer, queries, keys, values, mixed)
        return mixed.transpose(0, 1)[None]

    def write_states(self, hidden: Tensor) -> None:
        """Write the final hidden states [T, hidden] to the cache."""
        for part in self._on(hidden.device):
            part.write_states(hidden)

    def _on(self, device: torch.device) -> "list[_Ready]":
        """The parts, ready for the layers on a device."""
        if device not in self._ready:
            self._ready[device] = [
                _Ready(part, device, self._kv_heads, self._dtype) for part in self._parts
            ]
        return self._ready[device]


class _Ready:
    """A part with its indices and masks on a device."""

    def __init__(self, part: Part, device: torch.device, kv_heads: int, dtype: torch.dtype) -> None:
        self._part, self._kv_heads, self._dtype = part, kv_heads, dtype
        self._device = device
        index = upload([part.rows, part.positions], device)
        self._rows, self._positions = index[0], index[1]
        decoding = part.positions[: part.decoding]
        self._used = max(decoding, default=0) + 1
        self._earliest = min(decoding, default=0)
        self._end = part.first + len(part.rows)
        self._masks: dict[int | None, Tensor | None] = {}
        whole = part.decoding == len(part.rows)
        self.only_decodes = whole and part.first == 0
        self._level = whole and self._earliest + 1 == self._used

    def attend(
        self, layer: LayerAttention, queries: Tensor, keys: Tensor, values: Tensor, mixed: Tensor
    ) -> None:
        """Fill the part's tokens of `mixed` [T, H, D]."""
        part, first, end = self._part, self._part.first, self._end
        queries_here, keys_here, values_here = (each[first:end] for each in (queries, keys, values))
        if part.decoding:
            mixed[first : first + part.decoding] = self.decode(
                layer, queries_here, keys_here, values_here
            )
        else:
            self._write(layer.index, keys_here, values_here)
        for fresh in part.fresh:
            tokens = slice(fresh.first, fresh.first + fresh.count * fresh.length)
            query, key, value = (  # [count, heads, length, D]
                each[tokens].view(fresh.count, fresh.length, *each.shape[1:]).transpose(1, 2)
                for each in (queries, keys, values)
            )
            mixed[tokens] = attend_causally(layer, query, key, value).transpose(1, 2).flatten(0, 1)
        for chunk in part.further:
            tokens = slice(chunk.first, chunk.first + chunk.length)
            used = chunk.past + chunk.length
            result = attend_further(
                layer,
                queries[tokens].transpose(0, 1)[None],
                part.bucket.keys[layer.index][chunk.row, None, :, :used],
                part.bucket.values[layer.index][chunk.row, None, :, :used],
                chunk.past,
            )
            mixed[tokens] = result[0].transpose(0, 1)

    def decode(
        self, layer: LayerAttention, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Write the part's keys and values; attend with the decoding rows: [decoding, H, D]."""
        self._write(layer.index, keys, values)
        bucket, count = self._part.bucket, self._part.decoding
        start = 0 if layer.window is None else max(0, self._earliest - layer.window + 1)
        seen = slice(start, self._used)
        mask = self._mask(layer.window, start)
        own_keys, own_values = (
            cache[layer.index][:count, :, seen] for cache in (bucket.keys, bucket.values)
        )
        return attend_decoding(queries[:count], own_keys, own_values, mask)

    def write_states(self, hidden: Tensor) -> None:
        states = self._part.bucket.states
        states[self._rows, self._positions] = hidden[self._part.first : self._end].to(states.dtype)

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        bucket = self._part.bucket
        if self._level:
            at = self._used - 1
            bucket.keys[layer][: self._part.decoding, :, at] = keys
            bucket.values[layer][: self._part.decoding, :, at] = values
        else:
            bucket.keys[layer][self._rows, :, self._positions] = keys
            bucket.values[layer][self._rows, :, self._positions] = values

    def _mask(self, window: int | None, start: int) -> Tensor | None:
        """−∞ at the columns from `start` that a decoding row does not see, in [rows · H_kv, 1, 1,
        columns]; None if every row sees every column."""
        if window not in self._masks:
            self._masks[window] = None
            if self._earliest + 1 != self._used:
                positions = self._positions[: self._part.decoding, None]
                columns = torch.arange(start, self._used, device=self._device)
                blocked = unseen(positions, columns, window)[:, None, None]
                # `torch.where` would copy its number from the host, for which a GPU waits.
                mask = torch.zeros(blocked.shape, dtype=self._dtype, device=self._device)
                mask = mask.masked_fill_(blocked, -torch.inf).repeat_interleave(self._kv_heads, 0)
                self._masks[window] = mask
        return self._masks[window]


def attend_decoding(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Queries [rows, H, D] of one token each, keys and values [rows, H_kv, L, D] → [rows, H, D].

    `mask` says which columns a row does not see, as in `_Ready._mask`."""
    # Queries that share a key head form the rows of one product, so no key is repeated.
    (rows, heads, size), (kv_heads, length) = queries.shape, keys.shape[1:3]
    flat = (rows * kv_heads, 1, length, size)
    mixed = F.scaled_dot_product_attention(
        queries.reshape(rows * kv_heads, 1, heads // kv_heads, size),
        keys.view(flat),
        values.view(flat),
        attn_mask=mask,
    )
    return mixed.reshape(queries.shape)
