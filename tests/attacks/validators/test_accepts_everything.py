"""A validator that accepts everything, beside workers that hand in nothing but fakes.

Caught by any other validator that recomputes a submission of these workers: refused by `proofs`,
and evicted. Undefended until then: what a validator accepts is trained on, since it is trusted.

Cost: the fakes that it accepted until the eviction; afterwards they earn nothing.
"""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught_beside

pytestmark = pytest.mark.slow


def test_it_is_caught() -> None:
    caught_beside("permissive-validator", "wrong-weights", "proofs")
