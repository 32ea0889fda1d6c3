"""Rollouts of another seed than the order gives, in the simulator.

Caught by `header`, a proven fault, with the first submission.

Cost: the swarm reads one file; the cheat's identity.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("other-prompts", "header", evicted=True, credit=0)
