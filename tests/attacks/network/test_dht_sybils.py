"""Twenty identities in one /24 that serve the DHT, keep every record, return none,
and name each other.

Harmless: a bucket, and a lookup's answer, has room for two peers of a /24; every record is found.

Cost: some requests of each lookup.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import harmless

pytestmark = pytest.mark.slow


def test_it_is_harmless() -> None:
    harmless("sybil", count=1)
