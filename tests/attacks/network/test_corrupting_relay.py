"""A relay that corrupts every checkpoint it serves.

Caught by the hash of each piece (`shardcast.piece_refused`): only that piece is fetched again, and
the relay is asked ever more rarely.

Cost: one piece for each attempt.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("corrupt-relay", "shardcast.piece_refused")
