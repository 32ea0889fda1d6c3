"""The checks of conditions that may change after a submission's acknowledgement.

They run before the submission is judged and when its verdict enters the log.
They cost nothing, and a verdict lists one only if it fails."""

from peers.validator.checks.base import Finding, at_most, check
from swarm.wire.messages import Eviction


@check("admission")
def not_evicted(evidence: Eviction | None) -> Finding:
    """The worker was not evicted from the run. Figure: 0 for an evicted worker, else 1."""
    if evidence is None:
        return Finding(1, 1, passed=True)
    return Finding(0, 1, passed=False, detail=f"its worker was evicted: {evidence.reason}")


@check("stale")
def staleness(evidence: tuple[int, int]) -> Finding:
    """The policy is recent enough for its rollouts to be trained on.

    Figure: the age of the policy, the number of policies published since; threshold: the most."""
    return at_most(*evidence, "its policy is too old to be trained on")


@check("spans")
def published(evidence: tuple[int, int]) -> Finding:
    """Every policy that the file names was published.

    Figure: the newest of them; the threshold is the newest policy announced."""
    return at_most(*evidence, f"it names policy {evidence[0]}, which no trainer has announced")
