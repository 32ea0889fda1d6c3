"""The statistical checks, which need the policy.

Rounding differs between machines, so none of them proves a fault. A failure refuses the
submission; a worker is evicted only when chance cannot explain its record.
"""

from __future__ import annotations

from dataclasses import dataclass

from peers.validator.checks.base import Check, Finding, at_most
from swarm.jobs.validation import ProofFigures, SamplingFigures
from swarm.messages import Thresholds


@dataclass(frozen=True)
class Recomputation:
    """One submission's figures, and the run's thresholds."""

    proofs: ProofFigures
    sampling: SamplingFigures
    thresholds: Thresholds


class Proofs(Check[Recomputation]):
    """The proofs fit the hidden states of the policy that the step order names (TOPLOC).

    Figure: the share of chunks whose proof fits.
    """

    name = "proofs"

    def examine(self, evidence: Recomputation) -> Finding:
        proofs, least = evidence.proofs, evidence.thresholds.proof_chunks_share_min
        return Finding(
            figure=proofs.chunks_passed / proofs.chunks,
            threshold=least,
            passed=proofs.chunks_passed >= least * proofs.chunks,
            detail=f"{proofs.chunks - proofs.chunks_passed} of {proofs.chunks} proofs do not fit "
            "the policy's activations",
        )


class Sampling(Check[Recomputation]):
    """Over the whole submission, the tokens are the ones that policy and noise determine.

    Figure: the pooled score, mean of min(margin, 1).
    """

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


class SamplingBound(Check[Recomputation]):
    """Rounding can explain the margin of every single token. Figure: the largest margin."""

    name = "sampling_bound"

    def examine(self, evidence: Recomputation) -> Finding:
        sampling = evidence.sampling
        return at_most(sampling.margin_max, evidence.thresholds.margin_max, explain(sampling))


CHECKS: tuple[Check[Recomputation], ...] = (Proofs(), Sampling(), SamplingBound())
