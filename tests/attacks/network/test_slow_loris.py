"""A relay that accepts every request, and sends a byte in five seconds.

Harmless: late pieces are requested from other peers as well, and a transfer below 64 KiB/s is
cancelled.

Cost: pieces that arrive twice, and a connection for some seconds.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import harmless

pytestmark = pytest.mark.slow


def test_it_is_harmless() -> None:
    harmless("slow-loris")
