"""Proofs have the right number and format; checking their content needs the policy."""

from __future__ import annotations

from peers.proofs.format import ProofFormatError, check_format, split
from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.checks.file.evidence import Inspection


class ProofFormat(Check[Inspection]):
    """Figure: rows with a malformed proof."""

    name = "proof_format"
    proven = True

    def examine(self, evidence: Inspection) -> Finding:
        rollouts = evidence.rollouts
        faults = []
        for row, length in enumerate(rollouts.model_lengths().tolist()):
            try:
                check_format(split(rollouts.proof(row)), length)
            except ProofFormatError as error:
                faults.append(f"row {row}: {error}")
        return at_most(len(faults), 0, faults[0] if faults else "")
