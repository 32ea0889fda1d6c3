"""Files that the cheat does not like are kept back, and the next numbers handed in instead.

Caught by `file`: a number without its file settles nothing, and no later number of the step counts.

Cost: the cheat's own work: it is accepted up to its first number without a file in each step.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught("number-skipper", "file")
