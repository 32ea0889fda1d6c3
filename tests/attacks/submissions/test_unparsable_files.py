"""Files that cannot be parsed.

Caught by `schema`, a proven fault, with the first submission.

Cost: the swarm reads one file; the cheat's identity.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("malformed-files", "schema", evicted=True, credit=0)
