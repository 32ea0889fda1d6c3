"""Sampling noise of the rows being generated, computed for several positions at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from peers.engines.device import upload
from peers.engines.sampling import gumbel_noise

AHEAD_MAX = 16
"""Positions computed ahead for a row. A row that ends earlier has wasted the rest."""

ENTRIES_MAX = 1 << 18
"""Entries (positions times vocabulary) computed in one call on a CPU, in which temporary words take
50 bytes each. A large vocabulary times all rows would take gigabytes."""

ENTRIES_MAX_GPU = 1 << 24
"""The same on a GPU, whose kernel has no temporary words: 64 MB, and 800 MB without the kernel."""


class Noisy(Protocol):
    """A row as the noise sees it."""

    @property
    def noise_key(self) -> tuple[int, int] | None: ...
    @property
    def noise_row(self) -> int: ...

    @property
    def limit(self) -> int:
        """The position at which the row ends at the latest."""
        ...

    position: int
    """Model tokens sampled so far: the index of the next token."""
    noise: Ahead | None


@dataclass
class Ahead:
    """A row's share of the pool of computed noise."""

    entry: int
    first: int = 0
    """The position of the share's first vector."""
    end: int = 0
    """The position after its last vector. Positions only grow."""


class NoisePool:
    """Noise vectors of rows, `ahead` per row."""

    def __init__(self, vocabulary_size: int, device: torch.device) -> None:
        self._vocabulary_size = vocabulary_size
        on_cpu = device.type == "cpu"
        self._entries_max = ENTRIES_MAX if on_cpu else ENTRIES_MAX_GPU
        # A GPU computes one position of many rows as fast as several, and needs no memory for them.
        ahead = self._entries_max // (16 * vocabulary_size) if on_cpu else 1
        self._ahead = max(1, min(AHEAD_MAX, ahead))
        self._pool = torch.empty(0, self._ahead, vocabulary_size, device=device)
        self._free: list[int] = []

    def release(self, row: Noisy) -> None:
        """Forget a row's noise."""
        if row.noise is not None:
            self._free.append(row.noise.entry)
            row.noise = None

    def of(self, rows: Sequence[Noisy], soon: Iterable[Noisy] = ()) -> Tensor | None:
        """Noise [rows, vocabulary] at each row's position; None if no row has a key.

        Rows without a key get zeros. `soon` are rows to be generated next: their noise is computed
        along with that of others, because a call costs as much for one row as for several.
        """
        if self._ahead == 1:
            return self._now(rows)
        needy = [row for row in rows if row.noise is None or row.noise.end <= row.position]
        if needy:
            needy += [row for row in soon if row.noise is None]
            by_key: dict[tuple[int, int] | None, list[Noisy]] = {}
            for row in needy:
                by_key.setdefault(row.noise_key, []).append(row)
            for key, some in by_key.items():
                self._compute(key, some)
        if all(row.noise_key is None for row in rows):
            return None
        ahead = self._ahead
        index = [
            row.noise.entry * ahead + row.position - row.noise.first
            for row in rows
            if row.noise is not None
        ]
        flat = self._pool.view(-1, self._vocabulary_size)
        return flat.index_select(0, torch.tensor(index, device=flat.device))

    def _now(self, rows: Sequence[Noisy]) -> Tensor | None:
        """Noise at each row's position, kept for no other call: a vocabulary too large for more."""
        if all(row.noise_key is None for row in rows):
            return None
        found = self._pool.new_zeros(len(rows), self._vocabulary_size)
        by_key: dict[tuple[int, int] | None, list[int]] = {}
        for index, row in enumerate(rows):
            by_key.setdefault(row.noise_key, []).append(index)
        some = max(1, self._entries_max // self._vocabulary_size)
        for key, indices in by_key.items():
            for start in range(0, len(indices) if key is not None else 0, some):
                at = upload(indices[start : start + some], found.device)
                part = [rows[index] for index in indices[start : start + some]]
                numbers, positions = upload(
                    [[row.noise_row for row in part], [row.position for row in part]], found.device
                )
                assert key is not None
                found[at] = gumbel_noise(key, numbers, positions, self._vocabulary_size)
        return found

    def _compute(self, key: tuple[int, int] | None, rows: Sequence[Noisy]) -> None:
        entries = []
        count = min(self._ahead, max(row.limit - row.position for row in rows))
        for row in rows:
            if row.noise is None:
                row.noise = Ahead(self._take())
            row.noise.first, row.noise.end = row.position, row.position + count
            entries.append(row.noise.entry)
        some = max(1, self._entries_max // (count * self._vocabulary_size))
        device = self._pool.device
        steps = torch.arange(count, device=device)
        for start in range(0, len(rows), some):
            part = rows[start : start + some]
            index = torch.tensor(entries[start : start + some], device=device)
            if key is None:
                self._pool[index] = 0.0
                continue
            numbers, positions = torch.tensor(
                [[row.noise_row for row in part], [row.position for row in part]], device=device
            )
            self._pool[index, :count] = gumbel_noise(
                key, numbers[:, None], positions[:, None] + steps, self._vocabulary_size
            )

    def _take(self) -> int:
        if not self._free:
            count = len(self._pool)
            grown = self._pool.new_empty(max(8, 2 * count), *self._pool.shape[1:])
            grown[:count] = self._pool
            self._pool = grown
            self._free = list(range(len(grown) - 1, count - 1, -1))
        return self._free.pop()
