"""The cache of keys, values and hidden states of the rows being generated.

Rows lie in buckets by length; a bucket's rows have the same number of columns, twice those of the
bucket before. A row that outgrows its bucket moves to the next, so each of its positions is copied
about once, its memory is at most twice its length, and no attention reads far beyond the rows'
ends. In every row the column equals the position in the sequence, and the rows of a bucket are
always its first ones, so that attention reads the cache where it lies."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from peers.engines.architecture import Architecture
from peers.engines.device import is_out_of_memory, upload

COLUMNS_MIN = 64
"""Columns of the first bucket."""

STATE_DTYPE = torch.bfloat16
"""Hidden states are kept as proofs need them."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a cached position."""

    kv_heads: int
    head_size: int
    hidden_size: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]
    """Of each layer; the hidden states are on the last."""

    @classmethod
    def of(
        cls, model: Architecture, dtype: torch.dtype, devices: Sequence[torch.device]
    ) -> "Shape":
        sizes = model.kv_heads, model.head_size, model.hidden_size
        return cls(*sizes, dtype, tuple(devices))

    @property
    def device(self) -> torch.device:
        """Of the hidden states."""
        return self.devices[-1]

    @property
    def position_bytes(self) -> int:
        values = 2 * len(self.devices) * self.kv_heads * self.head_size
        return values * self.dtype.itemsize + self.hidden_size * STATE_DTYPE.itemsize


@dataclass(eq=False)
class Cached:
    """A row's place in the cache."""

    length: int = 0
    """Positions filled."""
    bucket: "Bucket[Any] | None" = None
    index: int = -1
    """The row's index in the bucket."""


R = TypeVar("R", bound=Cached)


@dataclass(eq=False)
class Copy:
    """The first positions of a row, copied out of the cache."""

    parts: list[Tensor]
    """Of each of `Bucket.caches` [..., length, width]."""

    @property
    def length(self) -> int:
        return self.parts[0].shape[-2]


class Bucket(Generic[R]):
    """Rows whose caches have the same number of columns."""

    def __init__(self, shape: Shape, columns: int) -> None:
        self.columns = columns
        self.rows: list[R] = []
        self._shape = shape
        self.keys, self.values, self.states = self._allocate(0)

    @property
    def capacity(self) -> int:
        """Rows that memory is allocated for."""
        return len(self.states)

    @property
    def caches(self) -> list[Tensor]:
        """Keys, values per layer [capacity, H_kv, columns, D]; last hidden states [capacity,
        columns, hidden]."""
        return [*self.keys, *self.values, self.states]

    @property
    def bytes(self) -> int:
        return self.capacity * self.columns * self._shape.position_bytes

    def add(self, row: R) -> None:
        """Append a row; the bucket must have room."""
        row.bucket, row.index = self, len(self.rows)
        self.rows.append(row)

    def remove(self, row: R) -> None:
        """Remove a row; the last one takes its index."""
        last = self.rows.pop()
        if last is not row:
            at, used = row.index, last.length
            for cache in self.caches:
                cache[at, ..., :used, :] = cache[last.index, ..., :used, :]
            self.rows[at], last.index = last, at
        row.bucket, row.index = None, -1

    def resize(self, capacity: int) -> None:
        """Allocate memory for that many rows, at least those present."""
        used, old = len(self.rows), self.caches
        self.keys, self.values, self.states = self._allocate(capacity)
        for target, source in zip(self.caches, old, strict=True):
            target[:used] = source[:used]

    def copy_in(self, row: R, copy: Copy) -> None:
        """Fill a row's first positions from a copy."""
        row.length = copy.length
        for cache, part in zip(self.caches, copy.parts, strict=True):
            cache[row.index, ..., : row.length, :] = part

    def copy_out(self, row: R, length: int) -> Copy:
        """Copy a row's first positions."""
        return Copy([cache[row.index, ..., :length, :].clone() for cache in self.caches])

    def share(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first positions of rows `sources` to as many rows `targets`."""
        devices = {cache.device for cache in self.caches}
        index = {each: upload([sources, targets], each) for each in devices}
        for cache in self.caches:
            source, target = index[cache.device]
            head = cache.narrow(-2, 0, length)
            head.index_copy_(0, target, head.index_select(0, source))

    def _allocate(self, capacity: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        shape = self._shape
        size = (capacity, shape.kv_heads, self.columns, shape.head_size)
        # A column not yet written has weight 0, but 0 times uninitialised memory may be NaN.
        keys, values = (
            [torch.zeros(size, dtype=shape.dtype, device=each) for each in shape.devices]
            for _ in range(2)
        )
        states = torch.empty(
            capacity, self.columns, shape.hidden_size, dtype=STATE_DTYPE, device=shape.device
        )
        return keys, values, states


@dataclass
class Cache(Generic[R]):
    """All buckets, within a bound on memory."""

    shape: Shape
    length_max: int
    bytes_max: int
    buckets: list[Bucket[R]] = field(default_factory=list)
    """By ascending columns."""
    copies_bytes: int = 0
    """Bytes of the copies that the owner holds."""

    @property
    def bytes(self) -> int:
        return self.copies_bytes + sum(bucket.bytes for bucket in self.buckets)

    def columns_for(self, length: int) -> int:
        """Columns of the bucket for a row of that length."""
        columns = COLUMNS_MIN
        while columns < length:
            columns *= 2
        return min(columns, self.length_max)

    def row_bytes(self, length: int) -> int:
        return self.columns_for(length) * self.shape.position_bytes

    def add(self, row: R, length: int, more: int = 0) -> bool:
        """Add a row, with some `more` to follow; False, and no change, if memory is short."""
        bucket = self._bucket(self.columns_for(length))
        used = len(bucket.rows)
        if used == bucket.capacity:
            wanted = [max(used + 1 + more, 2 * used), used + 1]
            if not any(self._resize(bucket, capacity) for capacity in wanted):
                return False
        bucket.add(row)
        return True

    def move(self, row: R, length: int) -> bool:
        """Move a row to the bucket for `length`; False, and no change, if memory is short."""
        before, at = row.bucket, row.index
        assert before is not None
        if not self.add(row, length):
            return False
        after, index, used = row.bucket, row.index, row.length
        assert after is not None
        for source, target in zip(before.caches, after.caches, strict=True):
            target[index, ..., :used, :] = source[at, ..., :used, :]
        row.bucket, row.index = before, at
        before.remove(row)
        row.bucket, row.index = after, index
        return True

    def remove(self, row: R) -> None:
        assert row.bucket is not None
        row.bucket.remove(row)
        row.length = 0

    def clear(self) -> None:
        """Free all memory; the cache must have no rows."""
        self.buckets.clear()

    def drop_idle(self) -> bool:
        """Free the memory of rows that have left; False if there is none."""
        idle = [bucket for bucket in self.buckets if bucket.capacity > len(bucket.rows)]
        return any([self._resize(bucket, len(bucket.rows)) for bucket in idle])

    def _resize(self, bucket: Bucket[R], capacity: int) -> bool:
        """Resize a bucket; False, and no change, if memory is short: then `bytes_max` may fall."""
        added = (capacity - bucket.capacity) * bucket.columns * self.shape.position_bytes
        if added > 0 and self.bytes + added > self.bytes_max:
            return False
        try:
            bucket.resize(capacity)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.bytes_max = min(self.bytes_max, self.bytes + max(0, added - 1))
            return False
        return True

    def _bucket(self, columns: int) -> Bucket[R]:
        for at, bucket in enumerate(self.buckets):
            if bucket.columns == columns:
                return bucket
            if bucket.columns > columns:
                self.buckets.insert(at, Bucket(self.shape, columns))
                return self.buckets[at]
        self.buckets.append(Bucket(self.shape, columns))
        return self.buckets[-1]
