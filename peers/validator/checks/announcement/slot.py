"""The worker delivered no other file under this number of this step."""

from __future__ import annotations

from peers.validator.checks.announcement.evidence import Announcement
from peers.validator.checks.base import Check, Finding


class FreeSlot(Check[Announcement]):
    """Figure: the submission number."""

    name = "number"

    def examine(self, evidence: Announcement) -> Finding:
        submission = evidence.submission
        free = evidence.slot_taken_by in (None, submission.digest)
        detail = "another file was delivered under this number"
        return Finding(submission.number, 1, free, detail)
