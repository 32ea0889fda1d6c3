"""Programs that sleep for 20 s each instead of rollouts, by four new identities without a model.

Caught by `proofs`: a few rows of every submission are recomputed before anything of it is
graded. What remains to be graded has a budget in seconds, and new identities never hold the last
lane.

Cost: the swarm recomputes one submission; the cheat's identity.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_they_are_never_run() -> None:
    caught("sleepers", "proofs", evicted=True, credit=0)
