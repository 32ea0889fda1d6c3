"""Which of several verdicts on one submission is final: one rule for all peers.

Validators, trainers and readers of the ledger apply the same rule to the verdicts that they know,
so that all of them reach the same state once they know the same verdicts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol


class Opinion(Protocol):
    """The fields of a verdict, or of its entry in a log, that the rule depends on."""

    @property
    def outcome(self) -> str: ...

    @property
    def proven_fault(self) -> bool: ...

    @property
    def recomputed(self) -> int: ...


def binds(opinion: Opinion) -> bool:
    """Whether a refusal binds all validators: it is a proven fault or rests on a recomputation.

    Any other refusal may hold at one validator only, for example of a file that came too late."""
    return opinion.outcome == "refused" and (opinion.proven_fault or opinion.recomputed > 0)


def settles(opinion: Opinion) -> bool:
    """Whether no other validator has to judge the submission after this verdict."""
    return opinion.outcome == "accepted" or binds(opinion)


def supersedes(newer: Opinion, older: Opinion) -> bool:
    """Whether a validator's later verdict replaces its first: only a recomputation does."""
    return newer.recomputed > 0 and older.recomputed == 0


def _weight(opinion: Opinion, *, taken: bool) -> int:
    """The verdict with the lowest weight is final."""
    if taken and opinion.outcome == "accepted":
        return 0  # a step took groups of the submission, which cannot be undone
    if binds(opinion):
        return 1 if opinion.proven_fault else 2
    if opinion.outcome == "accepted":
        return 3 if opinion.recomputed else 4
    return 5


def final(opinions: Mapping[str, Opinion], ranked: Sequence[str], *, taken: bool = False) -> str:
    """The validator whose verdict on a submission is final, among `opinions` by validator.

    In this order: an acceptance, if a step has taken groups of the submission; a proven fault; a
    refusal that rests on a recomputation; an acceptance that rests on one; any other acceptance;
    any other verdict. Among equals the validator that comes first in `ranked` decides."""
    order = {validator: place for place, validator in enumerate(ranked)}
    return min(
        opinions,
        key=lambda each: (_weight(opinions[each], taken=taken), order.get(each, len(order)), each),
    )


def contradictions(opinions: Mapping[str, Opinion]) -> list[tuple[str, str]]:
    """The pairs (refuses, accepts) of validators that contradict each other.

    Both have recomputed the submission, or one has found a fault that anyone can recompute. An
    acceptance without a recomputation contradicts nothing, except a proven fault."""
    refuse = sorted(each for each, opinion in opinions.items() if binds(opinion))
    accept = sorted(each for each, opinion in opinions.items() if opinion.outcome == "accepted")
    return [
        (refuses, accepts)
        for refuses, accepts in product(refuse, accept)
        if opinions[refuses].proven_fault or opinions[accepts].recomputed
    ]


@dataclass
class Tally:
    """One validator's verdicts, counted: figures that show one that judges unlike the others."""

    accepted: int = 0
    refused: int = 0
    quarantined: int = 0
    recomputed: int = 0
    """Verdicts that rest on a recomputation."""
    shared: int = 0
    """Verdicts on submissions that another validator has settled too."""
    refuses_alone: int = 0
    """Binding refusals of submissions that another validator accepted after a recomputation."""
    accepts_alone: int = 0
    """Acceptances that another validator's binding refusal overruled."""


def tallies(cases: Iterable[Mapping[str, Opinion]]) -> dict[str, Tally]:
    """The figures of each validator, from the verdicts on each submission by validator."""
    found: dict[str, Tally] = {}
    for opinions in cases:
        settled = [each for each, opinion in opinions.items() if settles(opinion)]
        contradicting = {refuses for refuses, _ in contradictions(opinions)}
        refused = any(binds(opinion) for opinion in opinions.values())
        for validator, opinion in opinions.items():
            figures = found.setdefault(validator, Tally())
            setattr(figures, opinion.outcome, getattr(figures, opinion.outcome) + 1)
            figures.recomputed += opinion.recomputed > 0
            figures.shared += settles(opinion) and len(settled) > 1
            figures.refuses_alone += validator in contradicting
            figures.accepts_alone += refused and opinion.outcome == "accepted"
    return dict(sorted(found.items()))
