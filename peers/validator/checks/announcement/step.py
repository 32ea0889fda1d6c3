"""The step is known and recent enough to be trained on."""

from __future__ import annotations

from peers.validator.checks.announcement.evidence import Announcement
from peers.validator.checks.base import Check, Finding


class Step(Check[Announcement]):
    """Figure: the step; threshold: the oldest step that is still trained on."""

    name = "step"

    def examine(self, evidence: Announcement) -> Finding:
        step = evidence.submission.step
        if evidence.order is None:
            return Finding(step, 0, passed=False, detail="no such step is known")
        newest = evidence.newest_order.step if evidence.newest_order else 0
        oldest = max(0, newest - evidence.manifest.schedule.max_staleness)
        return Finding(step, oldest, step >= oldest, "that step is too old to be trained on")
