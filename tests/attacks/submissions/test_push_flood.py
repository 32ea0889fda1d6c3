"""Files pushed and never announced, ten of 1 MiB at once.

Harmless: an identity may have eight unjudged files, its network and the run have bounds in bytes,
and a file that is not announced is removed after a minute.

Cost: the traffic and the disk space within these bounds.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import harmless

pytestmark = pytest.mark.slow


def test_it_is_harmless() -> None:
    harmless("pusher")
