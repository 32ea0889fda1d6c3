"""Rollouts that the policy did not generate, by a worker that is new to the run.

Caught by `proofs`, since everything of a new worker is recomputed; evicted within 20 s.

Cost: the swarm recomputes one submission; the cheat's identity.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("wrong-weights", "proofs", evicted=True, credit=0)
