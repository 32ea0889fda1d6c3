"""Weights rounded to 4 or 8 bits, to generate faster: int4, fp8, int8.

Caught by `proofs` (int4, at once) or by the worker's evidence (*policy*: fp8 within 2,000 tokens,
int8 within 20,000), although single submissions pass.

Cost: the swarm recomputes them; int8 changes fewer than 2 % of tokens until then, each by less than
rounding in 16 bits might.
"""

from __future__ import annotations

import pytest

from peers.calibration import weights
from peers.calibration.workers import Generates
from tests.attacks.models import Arena


def test_int4_is_refused_at_once(arena: Arena) -> None:
    assert arena.evicts(Generates(arena.changed(weights.int4, "int4")), 300).accepted == 0


def test_fp8_is_evicted_by_its_evidence(arena: Arena) -> None:
    arena.evicts(Generates(arena.changed(weights.fp8, "fp8")), 2000, "policy")


@pytest.mark.slow
def test_int8_changes_few_tokens_or_is_evicted(arena: Arena) -> None:
    met = arena.meets(Generates(arena.changed(weights.int8, "int8")), range(80))
    changed = sum(judged.evidence.mismatches for judged in arena.recomputed(met))
    assert changed < 0.02 * met.tokens, met
    assert abs(met.reward - arena.honest.reward) < 0.05
