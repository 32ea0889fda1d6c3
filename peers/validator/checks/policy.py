"""The statistical checks, which need the policy.

Rounding differs between machines, so none of them proves a fault. A failure refuses the
submission; a worker is evicted only when chance cannot explain the evidence of all of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peers.validator.checks.base import Finding, at_most, check
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


@check("proofs")
def proofs(evidence: Recomputation) -> Finding:
    """The share of chunks whose TOPLOC proof fits the hidden states of the step order's policy."""
    found, least = evidence.proofs, evidence.thresholds.proof_chunks_share_min
    return Finding(
        figure=found.chunks_passed / found.chunks,
        threshold=least,
        passed=found.chunks_passed >= least * found.chunks,
        detail=f"{found.chunks - found.chunks_passed} of {found.chunks} proofs do not fit "
        "the policy's activations",
    )


def _pooled(evidence: Recomputation, bets: Sequence[int], what: str) -> Finding:
    """log10 of the submission's own e-value, the odds against an honest one. If the run's bounds on
    honest means hold, the e-value exceeds 1/p with a probability of at most p."""
    figure = bans(bets)
    limit = -math.log10(evidence.thresholds.refusal_p_value)
    odds = f"; the odds against honest rounding are 10^{figure:.1f} to 1"
    return at_most(figure, limit, what + odds)


@check("activations")
def activations(evidence: Recomputation) -> Finding:
    """The proofs are of the policy's activations."""
    error = evidence.proofs.error_mean
    what = f"the proofs differ from the policy's activations by {error:.2g} on average"
    return _pooled(evidence, evidence.evidence.policy, what)


@check("sampling")
def sampling(evidence: Recomputation) -> Finding:
    """The tokens are the ones that policy and noise determine."""
    found = evidence.sampling
    what = (
        f"{found.mismatches} of {found.tokens} tokens are not what the policy and the "
        f"seed give, by {found.margin_mean:.2g} on average"
    )
    return _pooled(evidence, evidence.evidence.sampler, what)


@check("selection")
def selection(evidence: Recomputation) -> Finding:
    """Near ties do not depend on the rollouts' rewards, endings and lengths."""
    what = "near ties fell to the side that suits the outcome of their rollouts"
    return _pooled(evidence, evidence.evidence.selection, what)


@check("sampling_bound")
def sampling_bound(evidence: Recomputation) -> Finding:
    """Rounding can explain the margin of every single token. Figure: the largest margin."""
    found = evidence.sampling
    detail = (
        f"a token's margin is {found.margin_max:.2f}, more than rounding explains; "
        f"{found.mismatches} of {found.tokens} tokens are not what policy and seed give"
    )
    return at_most(found.margin_max, evidence.thresholds.margin_max, detail)


CHECKS = (proofs, activations, sampling, sampling_bound, selection)
