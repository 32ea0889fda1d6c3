"""The checks of conditions that may change after a submission's acknowledgement.

They run before the submission is judged and when its verdict enters the log.
They cost nothing, and a verdict lists one only if it fails.
"""

from __future__ import annotations

from typing import NamedTuple

from peers.validator.checks.base import Check, Finding, at_most
from swarm.wire.messages import Eviction


class NotEvicted(Check[Eviction | None]):
    """The worker was not evicted from the run. Figure: 0 for an evicted worker, else 1."""

    name = "admission"

    def examine(self, evidence: Eviction | None) -> Finding:
        if evidence is None:
            return Finding(1, 1, passed=True)
        return Finding(0, 1, passed=False, detail=f"its worker was evicted: {evidence.reason}")


class Age(NamedTuple):
    """Age of a submission's policy: the number of policies published since."""

    policies: int
    policies_max: int


class Staleness(Check[Age]):
    """The policy is recent enough for its rollouts to be trained on.

    Figure: the age of the policy.
    """

    name = "stale"

    def examine(self, evidence: Age) -> Finding:
        detail = "its policy is too old to be trained on"
        return at_most(evidence.policies, evidence.policies_max, detail)


class Named(NamedTuple):
    """The newest policy that a file names, and the newest one announced."""

    policy: int
    published: int


class Published(Check[Named]):
    """Every policy that the file names was published.

    Figure: the newest of them; the threshold is the newest policy announced.
    """

    name = "spans"

    def examine(self, evidence: Named) -> Finding:
        detail = f"it names policy {evidence.policy}, which no trainer has announced"
        return at_most(evidence.policy, evidence.published, detail)


WORKER = (NotEvicted(),)
POLICY = (Staleness(),)
SPANS = (Published(),)
