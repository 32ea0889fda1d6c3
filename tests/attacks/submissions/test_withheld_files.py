"""Submissions announced, and their files never delivered.

Caught by `file`: refused, unlogged, and nothing is judged or credited.

Cost: a message and a signature for each announcement, within the sender's rate.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("withholder", "file", credit=0)
