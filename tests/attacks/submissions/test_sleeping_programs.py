"""Programs that sleep for 20 s each instead of rollouts, by four new identities without a model.

Caught by `proofs`: a few rows of every submission are recomputed before anything of it is
graded. What remains to be graded has a budget in seconds, and new identities never hold the last
lane. A run that observes refuses no fakes, so there they come last and are graded for seconds only.

Cost: the swarm recomputes one submission; the cheat's identity.
"""

from __future__ import annotations

import pytest

from tests.attacks.hostile import Setting, attacked
from tests.attacks.simulated import COUNT, PACE, caught

pytestmark = pytest.mark.slow


def test_they_are_never_run() -> None:
    caught("sleepers", "proofs", evicted=True, credit=0)


def test_a_run_that_observes_keeps_its_pace_beside_them() -> None:
    """It refuses nobody for statistics, but who hands in what no engine gives comes last."""
    seconds = 90.0
    alone, beside = (
        attacked(Setting("sleepers" if count else None, count, seconds=seconds, observes=True))
        for count in (0, COUNT)
    )
    assert beside.violations == [] and not beside.evicted and not beside.honest_failed
    assert beside.honest_seconds[0] < alone.honest_seconds[0] + 15
    assert beside.policies >= PACE * alone.policies, (beside.policies, alone.policies)
