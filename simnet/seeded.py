"""Random sources derived from one seed: one for each peer, link and purpose, so that what one
draws never changes what another gets."""

from __future__ import annotations

import random

from swarm.rollouts.seeds import digest


def derive(seed: int, *names: str) -> bytes:
    """32 bytes that follow from the seed and the names of a purpose."""
    return digest("simnet/1", str(seed).encode(), *(name.encode() for name in names))


def source(seed: int, *names: str) -> random.Random:
    """The random source of one purpose: `source(seed, "world", peer)`."""
    return random.Random(int.from_bytes(derive(seed, *names), "big"))
