"""The worker pushed the file before it announced the submission."""

from __future__ import annotations

from peers.validator.checks.announcement.evidence import Announcement
from peers.validator.checks.base import Check, Finding


class Pushed(Check[Announcement]):
    """Figure: 1 for a pushed file, else 0."""

    name = "file"

    def examine(self, evidence: Announcement) -> Finding:
        pushed = evidence.pushed_bytes is not None
        return Finding(int(pushed), 1, pushed, "the file was not pushed before it was announced")
