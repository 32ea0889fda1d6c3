"""An evicted cheat returns at once with a new key, again and again.

Caught by `proofs` each time: all work of a new identity is recomputed, and none is credited.

Cost: the swarm recomputes one submission for each identity; the cheat its work and an admission.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("returner", "proofs", credit=0)
