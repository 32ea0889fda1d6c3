"""A flood of valid announcements, 200 at once, and of streams.

Harmless: each identity has a rate (50 messages a second, 400 at once) and 64 streams; neighbours
that break it are dropped.

Cost: the messages within the rate.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import harmless

pytestmark = pytest.mark.slow


def test_it_is_harmless() -> None:
    harmless("flooder")
