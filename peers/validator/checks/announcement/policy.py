"""The submission was sampled from the policy that its step order names."""

from __future__ import annotations

from peers.validator.checks.announcement.evidence import Announcement
from peers.validator.checks.base import Check, Finding


class Policy(Check[Announcement]):
    """Figure: the submission's policy; threshold: the order's."""

    name = "policy"

    def examine(self, evidence: Announcement) -> Finding:
        used, ordered = evidence.submission.policy, evidence.step_order.policy
        return Finding(used, ordered, used == ordered, "the step order names another policy")
