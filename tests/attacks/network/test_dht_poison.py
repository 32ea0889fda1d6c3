"""Lies in answers to the DHT: the attacker as closest peer and provider of everything, and
 unsigned records.

Harmless: records are verified, lookups take disjoint paths, and a provider that sends nothing is
dropped.

Cost: some requests of each lookup.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import harmless

pytestmark = pytest.mark.slow


def test_it_is_harmless() -> None:
    harmless("poisoner")
