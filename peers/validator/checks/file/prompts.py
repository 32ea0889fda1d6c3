"""Environments and prompts are the ones that the seed determines."""

from __future__ import annotations

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.checks.file.evidence import Inspection


class Prompts(Check[Inspection]):
    """Figure: rows with another environment or prompt."""

    name = "prompts"
    proven = True

    def examine(self, evidence: Inspection) -> Finding:
        rollouts, group_size = evidence.rollouts, evidence.group_size
        wrong = [
            row
            for row in range(len(rollouts))
            if rollouts.prompt(row) != evidence.prompts[row // group_size]
            or rollouts.environment[row] != evidence.groups[row // group_size].index
        ]
        detail = ""
        if wrong:
            detail = f"row {wrong[0]} does not have the prompt that the seed determines"
        return at_most(len(wrong), 0, detail)
