"""A peer's clock and randomness in a simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from simnet.seeded import source

T = TypeVar("T")

EPOCH = 1_800_000_000.0
"""Wall time of virtual second 0 (15 January 2027), for clocks that are right."""

BLOCKING_SECONDS = 0.001
"""Virtual time charged for a piece of blocking work."""


class SimulatedWorld:
    """Implements `swarm.world.World`: virtual time, and randomness from (seed, peer name).

    The wall clock is `skew_seconds` off at the start and gains `drift` seconds a second; blocking
    work runs in place and costs `blocking_seconds` of virtual time.
    """

    def __init__(
        self,
        seed: int,
        name: str,
        *,
        skew_seconds: float = 0.0,
        drift: float = 0.0,
        blocking_seconds: float = BLOCKING_SECONDS,
    ) -> None:
        self.random = source(seed, "world", name)
        self._secrets = source(seed, "secrets", name)
        self._skew_seconds = skew_seconds
        self._drift = drift
        self._blocking_seconds = blocking_seconds

    def now(self) -> float:
        return trio.current_time()

    def wall_time(self) -> float:
        return EPOCH + trio.current_time() * (1.0 + self._drift) + self._skew_seconds

    def correct_clock(self, seconds: float) -> None:
        """Add this to the wall time from now on."""
        self._skew_seconds += seconds

    def secret_bytes(self, count: int) -> bytes:
        """Seeded here: a simulation has no secrets."""
        return self._secrets.randbytes(count)

    async def run_blocking(self, function: Callable[[], T]) -> T:
        result = function()
        await trio.sleep(self._blocking_seconds)
        return result
