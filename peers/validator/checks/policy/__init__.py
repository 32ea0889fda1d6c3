"""The statistical checks, for which the policy is needed. Rounding differs between machines, so
none of them proves a fault: they refuse, and evict only when chance cannot explain a record."""

from peers.validator.checks.base import Check
from peers.validator.checks.policy.evidence import ProofFigures, Recomputation, SamplingFigures
from peers.validator.checks.policy.proofs import Proofs
from peers.validator.checks.policy.sampling import Sampling
from peers.validator.checks.policy.sampling_bound import SamplingBound

CHECKS: tuple[Check[Recomputation], ...] = (Proofs(), Sampling(), SamplingBound())

__all__ = ["CHECKS", "ProofFigures", "Recomputation", "SamplingFigures"]
