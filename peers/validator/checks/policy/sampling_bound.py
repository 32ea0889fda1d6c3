"""Rounding can explain the margin of every single token."""

from __future__ import annotations

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.checks.policy.evidence import Recomputation
from peers.validator.checks.policy.sampling import explain


class SamplingBound(Check[Recomputation]):
    """Figure: the largest margin."""

    name = "sampling_bound"

    def examine(self, evidence: Recomputation) -> Finding:
        sampling = evidence.sampling
        return at_most(sampling.margin_max, evidence.thresholds.margin_max, explain(sampling))
