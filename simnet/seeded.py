"""Random sources derived from one seed, one per peer, link and purpose: draws from one source never
change another."""

from __future__ import annotations

import random

from swarm.rollouts.seeds import digest


def derive(seed: int, *names: str) -> bytes:
    """Derive 32 bytes from the seed and the names of a purpose."""
    return digest("simnet/1", str(seed).encode(), *(name.encode() for name in names))


def source(seed: int, *names: str) -> random.Random:
    """The random source of one purpose: `source(seed, "world", peer)`."""
    return random.Random(int.from_bytes(derive(seed, *names), "big"))
