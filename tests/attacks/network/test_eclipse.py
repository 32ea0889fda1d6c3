"""Identities ground to be nearest to the run's and the trainer's records, each in a
network of its own.

Harmless to the run: newcomers get the manifest from a bootstrap peer and addresses by gossip.
Undefended for the records themselves, which an attacker with addresses in as many networks as a
record has holders can hide.

Cost: as many networks as a record has holders (20).
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import harmless

pytestmark = pytest.mark.slow


def test_it_is_harmless() -> None:
    harmless("eclipser", count=1)
