"""The parts of a submission's rewards, as a verdict carries them for display."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from swarm.wire.messages import REWARD_PARTS_MAX, REWARD_VALUES_MAX, RewardParts, Rewards

NAME_CHARACTERS_MAX = 200
"""Longest name of a part; the rest of a longer one is cut off."""


def bounded(parts: Mapping[str, float]) -> dict[str, float]:
    """The first parts by name, as many as a message may have."""
    return {name[:NAME_CHARACTERS_MAX]: parts[name] for name in sorted(parts)[:REWARD_PARTS_MAX]}


def parts_of(rollouts: Sequence[Mapping[str, float]]) -> RewardParts:
    """The parts of all rollouts of a submission; of too many, the first by name."""
    found = [bounded(each) for each in rollouts]
    fit = min(REWARD_PARTS_MAX, REWARD_VALUES_MAX // max(1, len(found)) - 1)
    names = sorted({name for each in found for name in each})[: max(0, fit)]
    with np.errstate(over="ignore"):  # what float32 cannot hold is left out
        values = np.array([[each.get(name, np.nan) for each in found] for name in names], "<f4")
    return RewardParts(names=names, values=values.tobytes())


def parts_in(parts: RewardParts, rewards: Rewards, group: int) -> list[dict[str, float]]:
    """The parts of a group's rewards, by sample; nothing if they do not fit the rewards."""
    count, size = sum(map(len, rewards)), len(rewards[group])
    if len(parts.values) != 4 * len(parts.names) * count:
        return [{} for _ in range(size)]
    values = np.frombuffer(parts.values, "<f4").reshape(len(parts.names), count)
    first = sum(map(len, rewards[:group]))
    return [
        {
            name: float(value)
            for name, value in zip(parts.names, values[:, row], strict=True)
            if math.isfinite(value)
        }
        for row in range(first, first + size)
    ]


def mean_parts(rollouts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each part over the rollouts that have it."""
    found: dict[str, list[float]] = {}
    for each in rollouts:
        for name, value in each.items():
            found.setdefault(name, []).append(value)
    return {name: sum(found[name]) / len(found[name]) for name in sorted(found)}
