"""Fakes in one of eight submissions, the others honest.

Caught by `proofs`, as soon as one of them is recomputed; then the eviction voids the credit held.

Cost: the cheat's honest work and its identity.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("occasional-liar", "proofs")
