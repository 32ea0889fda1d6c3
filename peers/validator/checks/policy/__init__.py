"""The statistical checks, which need the policy.

Rounding differs between machines, so none of them proves a fault. A failure refuses the
submission; a worker is evicted only when chance cannot explain its record.
"""

from peers.validator.checks.base import Check
from peers.validator.checks.policy.evidence import ProofFigures, Recomputation, SamplingFigures
from peers.validator.checks.policy.proofs import Proofs
from peers.validator.checks.policy.sampling import Sampling
from peers.validator.checks.policy.sampling_bound import SamplingBound

CHECKS: tuple[Check[Recomputation], ...] = (Proofs(), Sampling(), SamplingBound())

__all__ = ["CHECKS", "ProofFigures", "Recomputation", "SamplingFigures"]
