"""Streams of the DHT kept open and never answered.

Harmless: a request waits 2 to 3 s, and a peer that is late twice is dropped from the contacts.

Cost: those seconds, once for each contact.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import harmless

pytestmark = pytest.mark.slow


def test_it_is_harmless() -> None:
    harmless("silent")
