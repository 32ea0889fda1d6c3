"""Replayed messages of trusted peers, and messages dated in the future or of another run.

Harmless: a state counts only if it is newer, an event once until it expires; others are dropped as
from the future or of the wrong run (tests/network/test_envelope.py).

Cost: one signature check for each, within the sender's rate.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import harmless

pytestmark = pytest.mark.slow


def test_it_is_harmless() -> None:
    harmless("replayer")
