"""Over the whole submission, the tokens are the ones that policy and noise determine."""

from __future__ import annotations

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.checks.policy.evidence import Recomputation, SamplingFigures


class Sampling(Check[Recomputation]):
    """Figure: the pooled score, mean of min(margin, 1)."""

    name = "sampling"

    def examine(self, evidence: Recomputation) -> Finding:
        sampling = evidence.sampling
        return at_most(sampling.margin_mean, evidence.thresholds.margin_mean_max, explain(sampling))


def explain(sampling: SamplingFigures) -> str:
    """One sentence about the tokens that do not fit."""
    return (
        f"{sampling.mismatches} of {sampling.positions} tokens are not what the policy and the "
        f"seed give; the largest margin is {sampling.margin_max:.2f}"
    )
