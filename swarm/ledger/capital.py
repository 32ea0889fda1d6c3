"""The capital of the bets against one worker in one validator's log.

`peers.validator.evidence` places the bets and explains the bounds. The recursion is here because a
seal carries its state into the next epoch (`swarm.ledger.epochs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.ledger.entries import SealedCapital
from swarm.wire.messages import Evidence

PROCESSES = ("sampler", "policy", "text", "selection")
"""The fields of `Evidence` that hold bets."""

UNITS_PER_NAT = 1000
"""Gains are whole thousandths of a nat, so that their sums are exact on every machine."""


UNITS_MAX = 10**12
"""The most that a bet can be said to have gained."""


def rounded(nats: float) -> int:
    """Whole thousandths of a nat, rounded down, which keeps a capital a supermartingale."""
    return math.floor(nats * UNITS_PER_NAT)


def log_sum(first: float, second: float) -> float:
    """log(exp(first) + exp(second))."""
    top = max(first, second)
    return top if top == -math.inf else top + math.log1p(math.exp(min(first, second) - top))


def log_mean(logs: Sequence[float]) -> float:
    """log of the mean of exp(logs); 0, the log of an untouched capital, if there are none."""
    if not logs:
        return 0.0
    top = max(logs)
    if top == -math.inf:
        return top
    return top + math.log(sum(math.exp(each - top) for each in logs) / len(logs))


@dataclass
class Capital:
    """One process's bets in one validator's log."""

    submissions: int = 0
    entered: list[float] = field(default_factory=list)
    """[bets] log of the capital entered so far, with its gains."""

    def add(self, bets: Sequence[int]) -> None:
        """Add the gains of the next submission's bets, in thousandths of a nat."""
        self.submissions += 1
        entry = -math.log(self.submissions * (self.submissions + 1))
        before = self.entered
        if len(before) != len(bets):  # at first, and after a validator's change of version
            before = [-math.inf] * len(bets)
        self.entered = [
            log_sum(entered, entry) + bet / UNITS_PER_NAT
            for entered, bet in zip(before, bets, strict=True)
        ]

    def log_capitals(self) -> list[float]:
        """[bets] log of the capital, cash included."""
        cash = -math.log(self.submissions + 1)
        return [log_sum(entered, cash) for entered in self.entered]


@dataclass
class Capitals:
    """All processes of one worker in one validator's log."""

    of: dict[str, Capital] = field(default_factory=lambda: {name: Capital() for name in PROCESSES})
    """By process."""

    def add(self, evidence: Evidence) -> None:
        """Add the evidence of the next verdict.

        A second opinion that confirms the first has no bets: each submission is bet on once.
        """
        if evidence.sampler:
            for name in PROCESSES:
                self.of[name].add(getattr(evidence, name))

    def sealed(self) -> list[SealedCapital]:
        """The capitals for a seal, in the order of `PROCESSES`; empty without a bet."""
        if not any(capital.submissions for capital in self.of.values()):
            return []
        return [
            SealedCapital(
                submissions=capital.submissions,
                entered=[
                    max(-UNITS_MAX, min(rounded(each), UNITS_MAX)) for each in capital.entered
                ],
            )
            for capital in self.of.values()
        ]

    @classmethod
    def unsealed(cls, sealed: Sequence[SealedCapital]) -> Capitals:
        """Continue from a seal."""
        found = cls()
        for name, each in zip(PROCESSES, sealed, strict=False):
            entered = [units / UNITS_PER_NAT for units in each.entered]
            found.of[name] = Capital(each.submissions, entered)
        return found
