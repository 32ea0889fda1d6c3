"""The step order allows the submission number."""

from __future__ import annotations

from peers.validator.checks.announcement.evidence import Announcement
from peers.validator.checks.base import Check, Finding, at_most


class Number(Check[Announcement]):
    """Figure: the submission number; threshold: the highest allowed number."""

    name = "number"

    def examine(self, evidence: Announcement) -> Finding:
        return at_most(
            evidence.submission.number,
            evidence.step_order.submissions_max - 1,
            "more submissions than the step order allows one worker",
        )
