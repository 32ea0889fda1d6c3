"""Step orders and weights in the trainer's name, signed with the attacker's own key.

Caught by the signature: neighbours drop the message and ban the sender (`gossip.neighbour_banned`).

Cost: one signature check for each forged message, within the sender's rate.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("forger", "gossip.neighbour_banned")
