"""A peer's clock and randomness in a simulation."""

import random

import trio

from swarm.rollouts.seeds import digest


def derive(seed: int, *names: str) -> bytes:
    """Derive 32 bytes from the seed and the names of a purpose."""
    return digest("simnet/1", str(seed).encode(), *(name.encode() for name in names))


def source(seed: int, *names: str) -> random.Random:
    """The random source of one purpose: `source(seed, "world", peer)`."""
    return random.Random(int.from_bytes(derive(seed, *names), "big"))


EPOCH = 1_800_000_000.0
"""Wall time of virtual second 0 (15 January 2027) on a correct clock."""


class SimulatedWorld:
    """Implements `swarm.world.World`: virtual time, and randomness from (seed, peer name).

    The wall clock is `skew_seconds` off.
    """

    def __init__(self, seed: int, name: str, *, skew_seconds: float = 0.0) -> None:
        self.random = source(seed, "world", name)
        self._secrets = source(seed, "secrets", name)
        self._skew_seconds = skew_seconds

    def now(self) -> float:
        return trio.current_time()

    def wall_time(self) -> float:
        return EPOCH + trio.current_time() + self._skew_seconds

    def correct_clock(self, seconds: float) -> None:
        """Add this to the wall time from now on."""
        self._skew_seconds += seconds

    def secret_bytes(self, count: int) -> bytes:
        """Seeded bytes: a simulation has no secrets."""
        return self._secrets.randbytes(count)
