"""Another worker's file handed in byte for byte, while that worker delivers it.

Caught by `header`, a proven fault, with the first submission; the maker is credited.

Cost: the swarm reads one file; the cheat's identity.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("copier", "header", evicted=True)
