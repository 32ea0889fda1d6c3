"""The real machine: trio's clock, the system's wall time, threads for blocking work."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")


class Machine:
    """Implements `swarm.world.World` on this computer."""

    def __init__(self) -> None:
        self.random = random.Random(random.SystemRandom().getrandbits(64))
        self._correction_seconds = 0.0

    def now(self) -> float:
        return trio.current_time()

    def wall_time(self) -> float:
        return time.time() + self._correction_seconds

    def correct_clock(self, seconds: float) -> None:
        """Add this to the system's wall time from now on (the clock is off; design §6)."""
        self._correction_seconds += seconds

    def secret_bytes(self, count: int) -> bytes:
        """Bytes of the system's cryptographic generator."""
        return secrets.token_bytes(count)

    async def run_blocking(self, function: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(function)
