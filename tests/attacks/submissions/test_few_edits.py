"""2 % of the tokens replaced by ones that suit the cheat, each within the bound on a single token.

Caught by its evidence (*sampler*): evicted, though each single submission passes.

Cost: the cheat's identity, and the credit it holds.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("editor", "membership.peer_evicted", evicted=True, credit=0)
