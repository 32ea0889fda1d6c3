"""The submission follows the version of the run manifest that its step order names."""

from __future__ import annotations

from peers.validator.checks.announcement.evidence import Announcement
from peers.validator.checks.base import Check, Finding
from swarm.run.manifest import manifest_in


class Version(Check[Announcement]):
    """Figure: the submission's version of the manifest (0: unknown); threshold: the order's."""

    name = "version"

    def examine(self, evidence: Announcement) -> Finding:
        submission, order = evidence.submission, evidence.step_order
        made_under = evidence.run.version(submission.run_digest)
        return Finding(
            figure=manifest_in(made_under).version if made_under else 0,
            threshold=order.run_version,
            passed=submission.run_digest == order.run_digest,
            detail="the step order names another version of the run",
        )
