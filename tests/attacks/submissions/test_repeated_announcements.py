"""Every submission announced thirty times, each time signed anew.

Harmless: a waiting submission's acknowledgement is signed and gossiped once.

Cost: one signature check for each announcement.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import harmless

pytestmark = pytest.mark.slow


def test_it_is_harmless() -> None:
    harmless("reannouncer")
