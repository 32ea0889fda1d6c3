"""Another worker's file announced as one's own, and not delivered.

Caught by `file`; the maker's file is judged and credited as usual.

Cost: a message and a signature for each announcement.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("claimant", "file", credit=0)
