"""A validator that refuses all work of one worker, and claims evidence that it invented.

Undefended: the worker is evicted, since a validator's evidence counts. The log shows who refused
whom and on what figures, anybody with the policy can recompute them, and the owner reinstates.

Cost: that worker's contribution, until the owner removes the validator.
"""

from __future__ import annotations

import pytest

from tests.attacks.hostile import Setting, attacked

pytestmark = pytest.mark.slow


def test_an_honest_worker_is_evicted() -> None:
    outcome = attacked(Setting("refusing-validator"))
    assert len(outcome.violations) > 0
    assert "an honest peer is not evicted" in outcome.violations[0]
