"""The statistical checks, which need the policy.

Rounding differs between machines, so none of them proves a fault. A failure refuses the
submission; a worker is evicted only when chance cannot explain the evidence of all of them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.evidence.submission import bans
from swarm.jobs.validation import ProofFigures, SamplingFigures
from swarm.wire.manifest import Thresholds
from swarm.wire.messages import Evidence


@dataclass(frozen=True)
class Recomputation:
    """One submission's figures, the gains of all bets, and the run's thresholds."""

    proofs: ProofFigures
    sampling: SamplingFigures
    evidence: Evidence
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


class _Pooled(Check[Recomputation]):
    """Over the whole submission, honest rounding explains what the recomputation shows.

    Figure: log10 of the submission's own e-value, the odds against an honest one. If the run's
    bounds on honest means hold, the e-value exceeds 1/p with a probability of at most p.
    """

    def examine(self, evidence: Recomputation) -> Finding:
        figure = bans(getattr(evidence.evidence, self.process))
        limit = -math.log10(evidence.thresholds.refusal_p_value)
        odds = f"; the odds against honest rounding are 10^{figure:.1f} to 1"
        return at_most(figure, limit, self.explain(evidence) + odds)

    @property
    @abstractmethod
    def process(self) -> str:
        """The field of `Evidence` with the bets."""

    @abstractmethod
    def explain(self, evidence: Recomputation) -> str:
        """What does not fit, as the begin of a sentence."""


class Activations(_Pooled):
    """The proofs are of the policy's activations."""

    name = "activations"
    process = "policy"

    def explain(self, evidence: Recomputation) -> str:
        error = evidence.proofs.error_mean
        return f"the proofs differ from the policy's activations by {error:.2g} on average"


class Sampling(_Pooled):
    """The tokens are the ones that policy and noise determine."""

    name = "sampling"
    process = "sampler"

    def explain(self, evidence: Recomputation) -> str:
        sampling = evidence.sampling
        return (
            f"{sampling.mismatches} of {sampling.tokens} tokens are not what the policy and the "
            f"seed give, by {sampling.margin_mean:.2g} on average"
        )


class Selection(_Pooled):
    """Near ties do not depend on the rollouts' rewards, endings and lengths."""

    name = "selection"
    process = "selection"

    def explain(self, evidence: Recomputation) -> str:
        return "near ties fell to the side that suits the outcome of their rollouts"


class SamplingBound(Check[Recomputation]):
    """Rounding can explain the margin of every single token. Figure: the largest margin."""

    name = "sampling_bound"

    def examine(self, evidence: Recomputation) -> Finding:
        sampling = evidence.sampling
        detail = (
            f"a token's margin is {sampling.margin_max:.2f}, more than rounding explains; "
            f"{sampling.mismatches} of {sampling.tokens} tokens are not what policy and seed give"
        )
        return at_most(sampling.margin_max, evidence.thresholds.margin_max, detail)


CHECKS: tuple[Check[Recomputation], ...] = (
    Proofs(),
    Activations(),
    Sampling(),
    SamplingBound(),
    Selection(),
)
