"""The submission has no more groups than the manifest allows."""

from __future__ import annotations

from peers.validator.checks.announcement.evidence import Announcement
from peers.validator.checks.base import Check, Finding, at_most


class Groups(Check[Announcement]):
    """Figure: the number of groups announced."""

    name = "groups"

    def examine(self, evidence: Announcement) -> Finding:
        return at_most(
            evidence.submission.groups,
            evidence.manifest.sampling.groups_per_submission,
            "more groups than the manifest allows in a submission",
        )
