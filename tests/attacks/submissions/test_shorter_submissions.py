"""A prefix of the groups: the last ones, which the cheat does not like, are left out.

Caught by `groups`: every submission has exactly the groups that the run asks for.

Cost: a message for each announcement; the cheat's work.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("shortener", "groups", credit=0)
