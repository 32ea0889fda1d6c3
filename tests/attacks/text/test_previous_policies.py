"""A previous policy, 1, 2 or 5 optimiser steps older than the one the order names.

Caught by `proofs` in the first submission that is recomputed, and evicted with it, at the demo's
learning rate of 6e-4. At rates below about 1e-6 nobody can tell policies apart, and their rollouts
are as good.

Cost: the swarm recomputes one submission; the cheat saves a download, and loses its identity.
"""

from __future__ import annotations

import pytest

from tests.attacks.cheats import Generates
from tests.attacks.models import FP32, PREVIOUS, Arena


@pytest.mark.parametrize("age", PREVIOUS)
def test_an_older_policy_is_caught(arena: Arena, age: int) -> None:
    met = arena.evicts(Generates(FP32.engine(arena.previous[age])), 300)
    assert met.accepted == 0
