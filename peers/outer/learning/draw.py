"""Which blocks of the data a trainer learns from in a round.

It follows from a seed, the round and the list of trainers, so it needs no word between trainers and
no position on disk. The blocks are in a random order, another in each epoch. A *window* of that
order belongs to each round and is divided among all trainers, whether they take part or not: no two
trainers see the same block in a round, and all blocks have been seen once before one is seen again
(but for a last part of the order that fills no window). If a round wants more blocks than there
are, each trainer repeats its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

from swarm.errors import UserError

_FEISTEL_ROUNDS = 4


@dataclass(frozen=True)
class Draw:
    """One trainer's draw of blocks, for a whole run."""

    blocks: int
    seed: int
    wanted: int
    """Blocks per trainer and round."""
    trainer: int = 0
    """Index of this trainer among all."""
    trainers: int = 1

    def __post_init__(self) -> None:
        """Raise `UserError` when a trainer would have no block."""
        if self.blocks < self.trainers:
            raise UserError(
                f"the data has {self.blocks} sequences to train on, for {self.trainers} trainers; "
                "give more data, or shorter sequences"
            )

    def of_round(self, round_: int) -> list[int]:
        """Indices of the blocks of a round, counted from 0, in the order of training."""
        share = min(self.wanted, self.blocks // self.trainers)
        windows = self.blocks // (share * self.trainers)
        epoch, window = divmod(round_, windows)
        first = (window * self.trainers + self.trainer) * share
        order = Permutation(self.blocks, b"%d/%d" % (self.seed, epoch))
        return [order[first + index % share] for index in range(self.wanted)]


class Permutation:
    """A random order of range(count), computed one index at a time: a Feistel network over the next
    power of 4, applied until it leads back into the range."""

    def __init__(self, count: int, key: bytes) -> None:
        self._count = count
        self._half = max(1, -(-(count - 1).bit_length() // 2))
        self._key = blake3(b"swarm/1/blocks/" + key).digest()

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(index)
        while True:
            index = self._once(index)
            if index < self._count:
                return index

    def __iter__(self) -> Iterator[int]:
        return (self[index] for index in range(self._count))

    def _once(self, index: int) -> int:
        mask = (1 << self._half) - 1
        left, right = index >> self._half, index & mask
        for round_ in range(_FEISTEL_ROUNDS):
            raw = bytes((round_,)) + right.to_bytes(8, "little")
            mixed = int.from_bytes(blake3(raw, key=self._key).digest(8), "little")
            left, right = right, left ^ (mixed & mask)
        return left << self._half | right
