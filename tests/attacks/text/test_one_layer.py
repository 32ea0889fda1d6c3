"""One layer of the policy off by 5 %, everything else right.

Caught by `proofs` in the first submission that is recomputed, and evicted with it (*policy* or
*sampler*).

Cost: the swarm recomputes one submission; the cheat gains nothing.
"""

from __future__ import annotations

from tests.attacks import weights
from tests.attacks.cheats import Generates
from tests.attacks.models import Arena


def test_one_layer_off_is_caught(arena: Arena) -> None:
    cheat = Generates(arena.changed(weights.one_layer(0.05), "layer"))
    assert arena.evicts(cheat, 300, "policy", "sampler").accepted == 0
