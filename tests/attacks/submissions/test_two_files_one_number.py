"""A second file under the same number, which differs in one group, for another validator.

Harmless: one file for each number is trained on, and credited.

Cost: the swarm recomputes some submissions twice.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import harmless

pytestmark = pytest.mark.slow


def test_it_is_harmless() -> None:
    harmless("double-deliverer", count=1)
