"""Submission n is judged after n - 1, so that a worker cannot skip a number it dislikes."""

from __future__ import annotations

from typing import NamedTuple

from peers.validator.checks.base import Check, Finding


class Turn(NamedTuple):
    """Whether a submission's turn came before the deadline."""

    number: int
    came: bool


class InTurn(Check[Turn]):
    """Figure: the submission number; threshold: the number before it."""

    name = "number"

    def examine(self, evidence: Turn) -> Finding:
        before = evidence.number - 1
        detail = f"submission {before} of this step was never delivered"
        return Finding(evidence.number, before, evidence.came, detail)
