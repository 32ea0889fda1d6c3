"""Sampling noise of the rows being generated: for several positions at once where a vocabulary is
tiny, or, where it is large, for the tokens that can win only."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peers.engines.device import upload
from peers.engines.engine import Request
from peers.engines.noise import Drawn, gumbel_noise
from peers.engines.winners import largest, pays

AHEAD = 16
"""Positions computed at once for a row with a tiny vocabulary, because a call costs as much for one
as for several. A row that ends earlier has wasted the rest."""

VOCABULARY_MAX = 1 << 10
"""Largest vocabulary for which positions are computed ahead, on a CPU."""

ENTRIES_MAX = 1 << 18
"""Entries (rows times vocabulary) computed in one call on a CPU, in which temporary words take 50
bytes each. A large vocabulary times all rows would take gigabytes."""

ENTRIES_MAX_GPU = 1 << 24
"""The same on a GPU: 800 MB."""


class Ahead(NamedTuple):
    """Noise of a row at successive positions."""

    first: int
    vectors: npt.NDArray[np.float32]
    """[positions, vocabulary]"""


class Noisy(Protocol):
    """A row as the noise sees it."""

    @property
    def noise_key(self) -> tuple[int, int] | None: ...
    @property
    def noise_row(self) -> int: ...

    position: int
    """Model tokens sampled so far: the index of the next token."""
    noise: Ahead | None


class OfRequest:
    """A row whose noise is that of its request; `Noisy`."""

    request: Request

    @property
    def noise_key(self) -> tuple[int, int] | None:
        return self.request.noise_key

    @property
    def noise_row(self) -> int:
        return self.request.row


def draw(
    rows: Sequence[Noisy], temperatures: Sequence[float], logits: Tensor
) -> list[tuple[int, float]]:
    """Each row's next token, and its log-probability, by logits [rows, vocabulary]."""
    first = temperatures[0]
    if temperatures.count(first) < len(rows):
        logits = logits / upload(temperatures, logits.device, torch.float32)[:, None]
    elif first != 1.0:
        logits = logits / first
    chosen = choose(rows, logits)
    log_mu = torch.log_softmax(logits, -1).gather(-1, chosen[:, None])[:, 0]
    # One tensor, so that the device is waited for once.
    tokens, values = torch.stack((chosen.double(), log_mu.double())).tolist()
    return list(zip(map(int, tokens), values, strict=True))


def choose(rows: Sequence[Noisy], logits: Tensor) -> Tensor:
    """Each row's next token, int64 [rows], by its logits [rows, vocabulary] over temperature.

    A row without a key gets the likeliest."""
    if not pays(logits):
        return (logits + noise_of(rows, logits)).max(-1).indices
    keyed = _by_key(rows)
    chosen = torch.empty(len(rows), dtype=torch.int64)
    if sum(map(len, keyed.values())) < len(rows):
        chosen = logits.max(-1).indices
    for key, indices in keyed.items():
        at = slice(None) if len(indices) == len(rows) else indices
        drawn = _drawn(key, [rows[index] for index in indices], logits.device)
        chosen[at] = largest(logits[at], drawn)[1][:, 0]
    return chosen


def noise_of(rows: Sequence[Noisy], logits: Tensor) -> Tensor:
    """Noise [rows, vocabulary] at each row's position; zeros for rows without a key."""
    size, device = logits.shape[-1], logits.device
    on_cpu = device.type == "cpu"
    if on_cpu and size <= VOCABULARY_MAX:
        return _kept(rows, size)
    found = torch.zeros(len(rows), size, device=device)
    some = max(1, (ENTRIES_MAX if on_cpu else ENTRIES_MAX_GPU) // size)
    for key, indices in _by_key(rows).items():
        for start in range(0, len(indices), some):
            part = indices[start : start + some]
            drawn = _drawn(key, [rows[index] for index in part], device)
            found[upload(part, device)] = drawn.noise(size)
    return found


def _kept(rows: Sequence[Noisy], size: int) -> Tensor:
    """`noise_of`, from vectors that are computed ahead."""
    empty = [row for row in rows if row.noise is None or row.position - row.noise.first >= AHEAD]
    for key, indices in _by_key(empty).items():
        some = [empty[index] for index in indices]
        drawn = _drawn(key, some, torch.device("cpu"))
        positions = drawn.positions[:, None] + torch.arange(AHEAD)
        vectors = gumbel_noise(key, drawn.rows[:, None], positions, size).numpy()
        for row, own in zip(some, vectors, strict=True):
            row.noise = Ahead(row.position, own)
    none = np.zeros(size, np.float32)
    return torch.from_numpy(
        np.stack(
            [
                none if row.noise is None else row.noise.vectors[row.position - row.noise.first]
                for row in rows
            ]
        )
    )


def _by_key(rows: Sequence[Noisy]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        if row.noise_key is not None:
            found.setdefault(row.noise_key, []).append(index)
    return found


def _drawn(key: tuple[int, int], rows: Sequence[Noisy], device: torch.device) -> Drawn:
    numbers = [[row.noise_row for row in rows], [row.position for row in rows]]
    return Drawn(key, *upload(numbers, device))
