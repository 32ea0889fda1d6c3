"""Near ties: where two tokens are nearly tied, the cheat takes the one that raises the reward.

Caught by the evidence: within 3,000 tokens (*sampler*) if it takes ties below 0.5; within 60,000
(*selection*) below 0.1 after 100 steps of training, 300,000 after 200. Until then *harmless*: 1 in
60 tokens can be chosen, and reward rises by less than 6 points.

Cost: the swarm recomputes them; the cheat generates and prefills each tie's continuation.
"""

from __future__ import annotations

import pytest

from tests.attacks.cheats import TakesTies
from tests.attacks.models import Arena


@pytest.mark.slow
def test_wide_ties_are_caught(arena: Arena) -> None:
    arena.evicts(TakesTies(arena.engine, 0.5), 3000, submissions=40)


@pytest.mark.slow
def test_narrow_ties_are_caught_later(arena: Arena) -> None:
    arena.evicts(TakesTies(arena.engine, 0.1), 12_000, "selection", submissions=55)


def test_narrow_ties_leave_little_choice(arena: Arena) -> None:
    met = arena.meets(TakesTies(arena.engine, 0.1), range(8))
    taken = sum(judged.evidence.mismatches for judged in arena.recomputed(met))
    assert taken <= met.tokens / 60
    same = arena.meets_honestly(range(8))
    assert met.reward - same.reward < 0.06
