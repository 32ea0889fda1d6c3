"""A smaller model decodes and the policy only prefills, so that the proofs are right.

Caught by `sampling` or `sampling_bound`: evicted (*text*) within 300 tokens if the small model
lacks a layer, within 3,000 if it is the policy in 4 bits.

Cost: the swarm recomputes them; the cheat prefills everything, for nothing.
"""

from __future__ import annotations

from tests.attacks import weights
from tests.attacks.cheats import Drafts
from tests.attacks.models import FP32, Arena, without_last_layer


def test_a_model_with_a_layer_less_is_caught(arena: Arena) -> None:
    small = FP32.engine(without_last_layer(arena))
    met = arena.evicts(Drafts(small, arena.engine), 300)
    assert met.accepted == 0 and met.failed["sampling"] == 1


def test_the_policy_in_4_bits_is_caught(arena: Arena) -> None:
    small = arena.changed(weights.int4, "draft")
    met = arena.evicts(Drafts(small, arena.engine), 3000)
    assert met.failed["proofs"] == 0, "the proofs are the policy's"
