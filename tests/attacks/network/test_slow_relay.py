"""A relay that serves at 1 kB/s.

Harmless: late pieces are requested from other peers as well.

Cost: pieces that arrive twice.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import harmless

pytestmark = pytest.mark.slow


def test_it_is_harmless() -> None:
    harmless("slow-source")
