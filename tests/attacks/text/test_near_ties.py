"""Near ties: where two tokens are nearly tied, the cheat takes the one that raises the reward.

Caught by the evidence (*sampler*) within 6,000 tokens, if it takes ties below 0.5. *Harmless* if it
takes those below 0.1: 1 in 60 tokens can be chosen, so a rollout of n tokens leaves n / 60 bits,
and reward rises by less than 6 points.

Cost: the swarm recomputes them; the cheat generates and prefills each tie's continuation.
"""

from __future__ import annotations

import pytest

from peers.calibration.workers import TakesTies
from tests.attacks.models import Arena


@pytest.mark.slow
def test_wide_ties_are_caught(arena: Arena) -> None:
    arena.evicts(TakesTies(arena.engine, 0.5), 6000, submissions=40)


def test_narrow_ties_leave_little_choice(arena: Arena) -> None:
    met = arena.meets(TakesTies(arena.engine, 0.1), range(8))
    taken = sum(judged.evidence.mismatches for judged in arena.recomputed(met))
    assert taken <= met.tokens / 60
    same = arena.meets_honestly(range(8))
    assert met.reward - same.reward < 0.06
