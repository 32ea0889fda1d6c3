"""Every file handed in again under numbers that no order asked for.

Caught by `number`: refused, and unlogged; its quota of unjudged files bounds what is stored.

Cost: the pushes, within the quota.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("submission-flooder", "number")
