"""Sampling noise of the rows being generated: for several positions at once, or, where a vocabulary
is large, for the tokens that can win only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from peers.engines.device import upload
from peers.engines.sampling import Drawn, gumbel_noise
from peers.engines.winners import largest, pays

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

    def choose(self, rows: Sequence[Noisy], logits: Tensor, soon: Iterable[Noisy] = ()) -> Tensor:
        """Each row's next token, int64 [rows], by its logits [rows, vocabulary] over temperature.

        A row without a key gets the likeliest. `soon`: see `of`.
        """
        if not pays(logits):
            noise = self.of(rows, soon)
            return (logits if noise is None else noise.add_(logits)).max(-1).indices
        chosen = logits.new_empty(len(rows), dtype=torch.int64)
        for key, indices in _by_key(rows).items():
            at = slice(None) if len(indices) == len(rows) else indices
            if key is None:
                chosen[at] = logits[at].max(-1).indices
            else:
                drawn = _drawn(key, [rows[index] for index in indices], logits.device)
                chosen[at] = largest(logits[at], drawn)[1][:, 0]
        return chosen

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
            for key, indices in _by_key(needy).items():
                self._compute(key, [needy[index] for index in indices])
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
        some = max(1, self._entries_max // self._vocabulary_size)
        for key, indices in _by_key(rows).items():
            for start in range(0, len(indices) if key is not None else 0, some):
                part = indices[start : start + some]
                assert key is not None
                drawn = _drawn(key, [rows[index] for index in part], found.device)
                at = upload(part, found.device)
                found[at] = gumbel_noise(key, drawn.rows, drawn.positions, self._vocabulary_size)
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
            drawn = _drawn(key, part, device)
            self._pool[index, :count] = gumbel_noise(
                key, drawn.rows[:, None], drawn.positions[:, None] + steps, self._vocabulary_size
            )

    def _take(self) -> int:
        if not self._free:
            count = len(self._pool)
            grown = self._pool.new_empty(max(8, 2 * count), *self._pool.shape[1:])
            grown[:count] = self._pool
            self._pool = grown
            self._free = list(range(len(grown) - 1, count - 1, -1))
        return self._free.pop()


def _by_key(rows: Sequence[Noisy]) -> dict[tuple[int, int] | None, list[int]]:
    """Indices of rows by key."""
    found: dict[tuple[int, int] | None, list[int]] = {}
    for index, row in enumerate(rows):
        found.setdefault(row.noise_key, []).append(index)
    return found


def _drawn(key: tuple[int, int], rows: Sequence[Noisy], device: torch.device) -> Drawn:
    """Where the noise of rows with one key comes from."""
    numbers = [[row.noise_row for row in rows], [row.position for row in rows]]
    return Drawn(key, *upload(numbers, device))
