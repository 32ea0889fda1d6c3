"""Every token was sampled from the policy that the step order names."""

from __future__ import annotations

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.checks.file.evidence import Inspection


class Spans(Check[Inspection]):
    """Figure: spans of model tokens that name another policy."""

    name = "spans"
    proven = True

    def examine(self, evidence: Inspection) -> Finding:
        policy = evidence.contents.header.policy
        others = int((evidence.rollouts.span_policies != policy).sum())
        return at_most(others, 0, f"{others} spans come from another policy than {policy}")
