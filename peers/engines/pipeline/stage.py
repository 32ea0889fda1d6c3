"""A stage: a range of a model's layers on one device, with the caches of the rows generated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from peers.engines.architecture import describe
from peers.engines.attention import LayerAttention, attend, attend_causally, attend_further, unseen
from peers.engines.experts import fuse_experts
from peers.engines.layers import Layers
from peers.engines.rotary import make_rotary
from peers.engines.weights import Weights

COLUMNS_MIN = 64
"""Positions of a new cache's rows; a cache grows by doubling."""


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class Work(msgspec.Struct, frozen=True):
    """Rows to advance. Their tokens are padded on the right to the longest."""

    lengths: list[Count]
    """Tokens of each row, at least 1."""
    starts: list[Count]
    """Position of each row's first token."""
    slots: list[Count]
    """Index of each row in the caches. Empty: the rows begin at 0 and nothing is kept."""

    def positions(self, device: torch.device) -> Tensor:
        """Position of each token, int64 [B, S]; those of padding go on counting."""
        starts = torch.tensor(self.starts, device=device)
        return starts[:, None] + torch.arange(max(self.lengths), device=device)


class LocalStage:
    """A stage in this process; `RemoteStage` is one in another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layers: Layers | None = None
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def load(
        self,
        config: Mapping[str, Any],
        span: range,
        dtype: torch.dtype,
        weights: Iterable[tuple[str, Tensor]],
    ) -> None:
        """Hold the layers of `span` from now on, with empty caches; weights by published names."""
        self.close()  # before the new layers need its memory
        self._model = model = describe(config)
        self._span, self._dtype = span, dtype
        taken = {name: tensor.to(self._device, dtype) for name, tensor in weights}
        source = f"layers {span.start} to {span.stop - 1}"
        found = Weights(model, fuse_experts(taken), source, self._device, dtype)
        self._layers = Layers(found, span, make_rotary(model, config, self._device, dtype))
        found.check_all_taken()

    @torch.no_grad()
    def run(self, work: Work, stream: Tensor) -> Tensor:
        """The stream [B, S, hidden] after this stage's layers."""
        assert self._layers is not None, "a stage runs after load"
        if work.slots:
            ends = [start + length for start, length in zip(work.starts, work.lengths, strict=True)]
            self._make_room(max(work.slots) + 1, max(ends))
        attention = _Attention(work, self._keys, self._values, self._device)
        moved = stream.to(self._device, self._dtype, copy=True)  # the layers change it in place
        length = max(work.starts, default=0) + max(work.lengths)
        return self._layers(moved, work.positions(self._device), attention, length)

    def shape(self, work: Work) -> tuple[int, int, int]:
        """[B, S, hidden] of the work's stream; raises `ValueError` if it lies outside the model."""
        if self._layers is None:
            raise ValueError("it holds no layers")
        ends = [start + length for start, length in zip(work.starts, work.lengths, strict=True)]
        if max(ends) > self._model.length_max:
            raise ValueError(f"position {max(ends)} is beyond the context length")
        return len(ends), max(work.lengths), self._model.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def close(self) -> None:
        self._layers = None
        self._keys, self._values = {}, {}

    def _make_room(self, slots: int, columns: int) -> None:
        """Grow the caches; rows that are cached stay."""
        first = self._keys.get(self._span.start)
        had = (0, 0) if first is None else (first.shape[0], first.shape[2])
        if slots <= had[0] and columns <= had[1]:
            return
        rows = max(had[0], slots)
        width = max(had[1], COLUMNS_MIN)
        while width < columns:
            width *= 2
        shape = (rows, self._model.kv_heads, width, self._model.head_size)
        for index in self._span:
            for caches in (self._keys, self._values):
                # A column not written has weight 0, but 0 times uninitialised memory may be NaN.
                new = torch.zeros(shape, dtype=self._dtype, device=self._device)
                if index in caches:
                    new[: had[0], :, : had[1]] = caches[index]
                caches[index] = new


class _Attention:
    """Writes keys and values to the caches, and attends."""

    def __init__(
        self,
        work: Work,
        keys: Mapping[int, Tensor],
        values: Mapping[int, Tensor],
        device: torch.device,
    ) -> None:
        self._work, self._keys, self._values = work, keys, values
        self._slots = torch.tensor(work.slots, device=device)
        self._starts = torch.tensor(work.starts, device=device)
        self._steps = max(work.lengths) == 1
        self._used = max(work.starts) + 1
        self._masks: dict[int | None, Tensor] = {}

    def __call__(self, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        work = self._work
        if not work.slots:
            return attend_causally(layer, query, key, value)
        keys, values = self._keys[layer.index], self._values[layer.index]
        if self._steps:
            keys[self._slots, :, self._starts] = key[:, :, 0]
            values[self._slots, :, self._starts] = value[:, :, 0]
            seen = keys[self._slots, :, : self._used]
            seen_values = values[self._slots, :, : self._used]
            return attend(layer, query, seen, seen_values, self._mask(layer.window))
        for row, (slot, start, length) in enumerate(
            zip(work.slots, work.starts, work.lengths, strict=True)
        ):
            keys[slot, :, start : start + length] = key[row, :, :length]
            values[slot, :, start : start + length] = value[row, :, :length]
        if not any(work.starts):
            return attend_causally(layer, query, key, value)
        mixed = torch.zeros_like(query)
        for row, (slot, start, length) in enumerate(
            zip(work.slots, work.starts, work.lengths, strict=True)
        ):
            one, end = slice(row, row + 1), start + length
            key_row, value_row = (each[None, slot, :, :end] for each in (keys, values))
            mixed[one, :, :length] = attend_further(
                layer, query[one, :, :length], key_row, value_row, start
            )
        return mixed

    def _mask(self, window: int | None) -> Tensor:
        """Slots that each row's single token does not see, bool [B, 1, 1, used]."""
        if window not in self._masks:
            index = torch.arange(self._used, device=self._starts.device)
            self._masks[window] = unseen(self._starts[:, None], index, window)[:, None, None]
        return self._masks[window]


def split_layers(count: int, parts: int, given: Sequence[int] = ()) -> list[range]:
    """The range of layers of each stage; `given` are the numbers of layers, if they are chosen."""
    sizes = list(given) or [count // parts + (index < count % parts) for index in range(parts)]
    if len(sizes) != parts or sum(sizes) != count or min(sizes) < 1:
        raise ValueError(f"{sizes} does not split {count} layers over {parts} stages")
    ends = [sum(sizes[: index + 1]) for index in range(parts)]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
