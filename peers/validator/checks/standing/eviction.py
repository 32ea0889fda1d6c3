"""The worker was not evicted from the run."""

from __future__ import annotations

from peers.validator.checks.base import Check, Finding
from swarm.messages import Eviction


class NotEvicted(Check[Eviction | None]):
    """Figure: 0 for an evicted worker, else 1."""

    name = "admission"

    def examine(self, evidence: Eviction | None) -> Finding:
        if evidence is None:
            return Finding(1, 1, passed=True)
        return Finding(0, 1, passed=False, detail=f"its worker was evicted: {evidence.reason}")
