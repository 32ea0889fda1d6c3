"""A record earned with honest work, and cashed in: six honest steps, then nothing but fakes.

Caught by `proofs`: the share that is recomputed follows what a fake could gain, and the eviction
voids the credit that is held.

Cost: the cheat's honest work and its identity; before the refusal its fakes are bounded by its
verified tokens over `recompute_safety`.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("turncoat", "proofs", evicted=True, credit=0)
