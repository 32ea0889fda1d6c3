"""Every submission shown to all validators at once, half of them fakes, in the hope that one does
not recompute it.

Caught by `proofs`: a refusal that rests on a recomputation beats any acceptance.

Cost: the swarm recomputes some submissions twice; the cheat's identity and credit.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("validator-shopper", "proofs", evicted=True, credit=0)
