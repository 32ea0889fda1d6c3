"""The proofs fit the hidden states of the policy that the step order names (TOPLOC)."""

from __future__ import annotations

from peers.validator.checks.base import Check, Finding
from peers.validator.checks.policy.evidence import Recomputation


class Proofs(Check[Recomputation]):
    """Figure: the share of chunks whose proof fits."""

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
