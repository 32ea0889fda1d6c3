"""The policy is recent enough for its rollouts to be trained on."""

from __future__ import annotations

from typing import NamedTuple

from peers.validator.checks.base import Check, Finding, at_most


class Age(NamedTuple):
    """Age of a submission's policy: the number of policies published since."""

    policies: int
    policies_max: int


class Staleness(Check[Age]):
    """Figure: the age of the policy."""

    name = "stale"

    def examine(self, evidence: Age) -> Finding:
        detail = "its policy is too old to be trained on"
        return at_most(evidence.policies, evidence.policies_max, detail)
