"""Conditions that may change after the acknowledgement: checked before a submission is judged and
when its verdict enters the log, which lists one only if it fails."""

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
    """The policy's age, in policies published since, is at most what is trained on."""
    return at_most(*evidence, "its policy is too old to be trained on")


@check("spans")
def published(evidence: tuple[int, int]) -> Finding:
    """The newest policy that the file names is at most the newest announced."""
    return at_most(*evidence, f"it names policy {evidence[0]}, which no trainer has announced")
