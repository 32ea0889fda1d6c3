"""A relay that claims to hold every piece, and serves none.

Caught by its refusals (`shardcast.piece_refused`): it is asked ever more rarely.

Cost: one request for each attempt.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("equivocating-relay", "shardcast.piece_refused")
