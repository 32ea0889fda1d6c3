"""Files that cannot be parsed, by a peer that returns with a new key after each eviction.

Caught by `schema` each time, a proven fault.

Cost: the swarm reads one file for each identity, and logs one verdict and one eviction.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("garbage-returner", "schema", credit=0)
