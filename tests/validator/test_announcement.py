"""Single announcements against what the validator knows."""

from __future__ import annotations

from typing import Any

import pytest

from peers.validator.checks.announcement import Announcement, step
from swarm.ledger.record import Rules
from swarm.run.run import Run
from swarm.wire.messages import StepOrder, Submission
from tests.network.harness import identity, manifest, sealed_manifest
from tests.orders import step_order

OWNER, TRAINER, VALIDATOR, WORKER = (identity(number) for number in range(1, 5))
RUN = Run(sealed_manifest(OWNER, manifest([TRAINER], [VALIDATOR])))


def announced(of: StepOrder, newest: StepOrder, **changes: Any) -> Announcement:
    submission = Submission(
        lineage=of.lineage, step=of.step, policy=of.policy, number=0, digest=bytes(32),
        size_bytes=1, groups=1,
    )  # fmt: skip
    return Announcement(
        **{
            "worker": WORKER.peer_id, "submission": submission, "admission": None, "run": RUN,
            "manifest": RUN.manifest, "order": of, "newest_order": newest, "slot_taken_by": None,
            "is_next": True, "on_trial": False, "unjudged": 0, "pushed_bytes": 1,
            "wall_time": 0.0, **changes,
        }
    )  # fmt: skip


@pytest.mark.parametrize("at", [4, 5, 9, 900])
def test_steps_of_an_abandoned_lineage_are_refused(at: int) -> None:
    """After a rollback, their policies can be fetched nowhere: each would hold the lane until the
    deadline, for credit of work that nobody trains on."""
    finding = step.examine(announced(step_order(at), step_order(5, 1)))
    assert not finding.passed
    assert "abandoned" in finding.detail


def test_open_steps_are_accepted() -> None:
    assert step.examine(announced(step_order(5, 1), step_order(5, 1))).passed
    assert step.examine(announced(step_order(3, 2), step_order(5, 1))).passed, (
        "the order came first"
    )


def test_a_submission_of_a_sealed_epoch_is_refused() -> None:
    """Its verdict may be pruned, so nothing here knows that it was judged."""
    newest = 500
    sealed = newest - Rules.of(RUN.manifest).hold_steps
    assert not step.examine(announced(step_order(sealed), step_order(newest))).passed
