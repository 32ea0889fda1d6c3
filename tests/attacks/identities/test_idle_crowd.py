"""A crowd of identities on one machine that take slots and deliver nothing.

Harmless: a network has `admissions.range_max` slots, and an idle identity loses its slot.

Cost: memory of the slots; a heartbeat's work every five seconds for each identity.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import harmless

pytestmark = pytest.mark.slow


def test_it_is_harmless() -> None:
    harmless("idle-identities", count=1)
