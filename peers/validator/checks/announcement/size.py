"""The pushed file has the announced size."""

from __future__ import annotations

from peers.validator.checks.announcement.evidence import Announcement
from peers.validator.checks.base import Check, Finding


class Size(Check[Announcement]):
    """Figure: bytes announced; threshold: bytes pushed."""

    name = "size"

    def examine(self, evidence: Announcement) -> Finding:
        announced, pushed = evidence.submission.size_bytes, evidence.pushed_bytes or 0
        detail = "the announced size is not the file's"
        return Finding(announced, pushed, announced == pushed, detail)
