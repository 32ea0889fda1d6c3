"""The order in which a trainer learns sequences, of one source or of a weighted mixture of several.

It is a function of seed, trainer and position alone. So a restart needs no state of the data, any
number of ranks divides the same batches, and trainers need no word from each other: in each epoch
of a source, all trainers together see each of its sequences once. Sources alternate in a fixed
pattern that spreads them evenly, so that every batch has nearly its weights' shares; each is
shuffled by itself, anew in each epoch."""

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from blake3 import blake3

from swarm.errors import UserError

RESOLUTION = 1000
"""Weights are rounded to this part of their sum, so that the pattern of sources stays short."""

Place: TypeAlias = tuple[int, int]
"""A source, and the index of a sequence there."""

_FEISTEL_ROUNDS = 4


class Mixture:
    """One trainer's order of the sequences of all sources, by position from 0 without an end."""

    def __init__(
        self,
        sizes: Sequence[int],
        seed: int,
        weights: Sequence[float] = (),
        trainer: int = 0,
        trainers: int = 1,
    ) -> None:
        """`sizes`: sequences of each source; `weights`: by source, may be left out for one.

        Raises `UserError` for a weight that has no effect, or where a trainer has no sequence."""
        for size in sizes:
            if size < trainers:
                raise UserError(
                    f"the data has {size} sequences to train on, for {trainers} trainers; give "
                    "more data, or shorter sequences"
                )
        self._sizes, self._seed = sizes, seed
        self._trainer, self._trainers = trainer, trainers
        self._quotas = _quotas(weights, len(sizes))
        self._pattern = _spread(self._quotas)

    def __getitem__(self, position: int) -> Place:
        period, slot = divmod(position, len(self._pattern))
        source, rank = self._pattern[slot]
        drawn = (period * self._quotas[source] + rank) * self._trainers + self._trainer
        epoch, index = divmod(drawn, self._sizes[source])
        order = Permutation(self._sizes[source], b"%d/%d/%d" % (self._seed, source, epoch))
        return source, order[index]

    def batch(self, step: int, size: int) -> list[Place]:
        return [self[position] for position in range(step * size, (step + 1) * size)]


def shares(weights: Sequence[float], sources: int, count: int) -> list[int]:
    """How many of `count` sequences are of each source; raises `UserError` as `Mixture` does."""
    quotas = _quotas(weights, sources)
    periods, rest = divmod(count, sum(quotas))
    drawn = [source for source, _ in _spread(quotas)[:rest]]
    return [periods * quota + drawn.count(source) for source, quota in enumerate(quotas)]


def _quotas(weights: Sequence[float], sources: int) -> list[int]:
    weights = weights or [1.0]
    if len(weights) != sources:
        raise UserError(
            f"data names {sources} sources and weights has {len(weights)} numbers; give one weight "
            "for each"
        )
    total = sum(weights)
    for weight in weights:
        if not (math.isfinite(total) and weight * RESOLUTION >= total > 0):
            raise UserError(
                f"weights has {weight:g} of a sum of {total:g}; each must be at least "
                f"1/{RESOLUTION} of it"
            )
    quotas = [round(RESOLUTION * weight / total) for weight in weights]
    return [quota // math.gcd(*quotas) for quota in quotas]


def _spread(quotas: Sequence[int]) -> list[tuple[int, int]]:
    """For each position of the pattern a source, and its rank among that source's positions: that
    which is furthest behind its share (Megatron-LM's build_blending_indices)."""
    counts, period = [0] * len(quotas), sum(quotas)
    pattern = []
    for position in range(1, period + 1):
        source = max(
            range(len(quotas)), key=lambda each: quotas[each] * position - counts[each] * period
        )
        pattern.append((source, counts[source]))
        counts[source] += 1
    return pattern


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
