"""A world for tests: `swarm.world.World` without a machine."""

from __future__ import annotations

import random

import trio

WALL = 1_800_000_000.0
"""Wall time, in seconds since the epoch, at which trio's mock clock starts."""


class VirtualWorld:
    """Trio's clock, one seed, and a wall clock that may be off."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.skew_seconds = 0.0

    def now(self) -> float:
        return trio.current_time()

    def wall_time(self) -> float:
        return WALL + trio.current_time() + self.skew_seconds

    def correct_clock(self, seconds: float) -> None:
        self.skew_seconds += seconds

    def secret_bytes(self, count: int) -> bytes:
        return self.random.randbytes(count)
