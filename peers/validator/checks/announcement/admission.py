"""The worker is a trusted peer or presents a valid admission."""

from __future__ import annotations

from peers.validator.checks.announcement.evidence import Announcement
from peers.validator.checks.base import Check, Finding
from swarm.run.admission import check_admission


class Admitted(Check[Announcement]):
    """Figure: 1 for a trusted peer or a valid admission, else 0."""

    name = "admission"

    def examine(self, evidence: Announcement) -> Finding:
        if evidence.worker in evidence.run.manifest.trusted_ids():
            return Finding(1, 1, passed=True)
        problem = (
            "none was shown"
            if evidence.admission is None
            else check_admission(
                evidence.admission, evidence.run, evidence.worker, evidence.wall_time
            )
        )
        if problem is None:
            return Finding(1, 1, passed=True)
        return Finding(0, 1, passed=False, detail=f"no valid admission: {problem}")
