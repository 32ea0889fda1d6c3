"""Speculative decoding: a cheap model drafts, and a draft is accepted if the policy nearly agrees.

Caught by the worker's evidence (*sampler*), if drafts are accepted up to 0.5 behind the seed's
token: within 1,000 tokens with an older policy as the draft, within 5,000 with int4. *Harmless* if
drafts are verified exactly: the tokens are those of honest work.

Cost: the swarm recomputes them; the cheat's identity.
"""

from __future__ import annotations

import pytest

from peers.engines.engine import Engine
from tests.attacks import weights
from tests.attacks.drawing import Drawing, Draws, Rule, within
from tests.attacks.models import FP32, Arena


def verifies(draft: Engine, tolerance: float) -> Rule:
    def rule(drawing: Drawing) -> object:
        drafted = (drawing.logits_of(draft) + drawing.noise()).argmax(-1)
        return within(drawing, drafted, tolerance)

    return rule  # type: ignore[return-value]


def test_lenient_acceptance_is_caught(arena: Arena) -> None:
    draft = FP32.engine(arena.previous[5])
    arena.evicts(Draws(arena.engine, verifies(draft, 0.5)), 1000)


@pytest.mark.slow
def test_lenient_acceptance_of_good_drafts_is_caught(arena: Arena) -> None:
    draft = arena.changed(weights.int4, "drafts")
    arena.evicts(Draws(arena.engine, verifies(draft, 0.5)), 5000, submissions=30)


def test_exact_verification_is_honest_work(arena: Arena) -> None:
    draft = arena.changed(weights.int4, "drafts")
    assert arena.meets(Draws(arena.engine, verifies(draft, 0.0)), range(3)).refused == 0
