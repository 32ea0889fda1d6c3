"""An entry, or an identity, ground after the nonce is known, so that prompts and noise suit
the cheat.

Caught by `entry`: a submission is drawn with the entry that a trusted peer's secret gives the
identity when it is admitted.

Cost: a message for each announcement; an admission for each identity that is tried.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("nonce-grinder", "entry", credit=0)
