"""Attacks by validators, which the owner trusts."""

from __future__ import annotations

import pytest

from tests.attacks.hostile import Setting, attacked
from tests.attacks.simulated import caught_beside

pytestmark = pytest.mark.slow


def test_accepts_everything() -> None:
    """A validator that accepts everything, beside workers that hand in nothing but fakes.

    Caught by any other validator that recomputes a submission of these workers: refused by
    `proofs`, and evicted. Undefended until then: what a validator accepts is trained on, since it
    is trusted.

    Cost: the fakes that it accepted until the eviction; afterwards they earn nothing.
    """
    caught_beside("permissive-validator", "wrong-weights", "proofs")


def test_refuses_one_worker() -> None:
    """A validator that refuses all work of one worker, and claims evidence that it invented.

    Undefended: the worker is evicted, since a validator's evidence counts. The log shows who
    refused whom and on what figures, anybody with the policy can recompute them, and the owner
    reinstates.

    Cost: that worker's contribution, until the owner removes the validator.
    """
    outcome = attacked(Setting("refusing-validator"))
    assert len(outcome.violations) > 0
    assert "an honest peer is not evicted" in outcome.violations[0]
