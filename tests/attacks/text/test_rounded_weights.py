"""Weights rounded to 4 or 8 bits, to generate faster: int4, fp8, int8.

Caught by `proofs` (int4, at once) or by the worker's evidence (fp8 within 2,000 tokens, *policy*),
although single submissions pass. Harmless if int8: fewer than 1 in 100 tokens differ, by as little
as rounding in 16 bits, and the rewards are those of honest work.

Cost: the swarm recomputes them.
"""

from __future__ import annotations

from tests.attacks import weights
from tests.attacks.cheats import Generates
from tests.attacks.models import Arena


def test_int4_is_refused_at_once(arena: Arena) -> None:
    assert arena.evicts(Generates(arena.changed(weights.int4, "int4")), 300).accepted == 0


def test_fp8_is_evicted_by_its_evidence(arena: Arena) -> None:
    arena.evicts(Generates(arena.changed(weights.fp8, "fp8")), 2000, "policy")


def test_int8_changes_few_tokens(arena: Arena) -> None:
    met = arena.meets(Generates(arena.changed(weights.int8, "int8")), range(12))
    changed = sum(judged.evidence.mismatches for judged in arena.recomputed(met))
    assert changed < 0.01 * met.tokens, met
    assert abs(met.reward - arena.meets_honestly(range(12)).reward) < 0.03
