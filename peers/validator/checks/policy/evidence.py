"""The evidence of the statistical checks: activations and sampling, recomputed with the weights."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.messages import Thresholds


@dataclass(frozen=True)
class ProofFigures:
    """How well the proofs fit the recomputed hidden states; means are over the chunks."""

    chunks: int
    chunks_passed: int
    exponents_min: int
    exponents_mean: float
    mantissa_mean_max: float


@dataclass(frozen=True)
class SamplingFigures:
    """How well the tokens fit the recomputed logits and the seed's noise."""

    tokens: int
    positions: int
    """Tokens for which p_max < 0.99, so that the policy left a choice."""
    mismatches: int
    """Tokens among `positions` that differ from the recomputed sample."""
    margin_mean: float
    """Mean of min(margin, 1) over `positions`."""
    margin_max: float
    """Largest margin of all tokens."""


@dataclass(frozen=True)
class Recomputation:
    """One submission's figures, and the run's thresholds."""

    proofs: ProofFigures
    sampling: SamplingFigures
    thresholds: Thresholds
