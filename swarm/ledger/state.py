"""A run's state, computed as a pure function of the union of the trusted peers' logs.

The order of the entries and repeated entries do not change the state. So no trusted peer has to
agree with another before it writes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarm.ledger import ruling
from swarm.ledger.entries import Consumed, Entry, Judged, Outcome


@dataclass(frozen=True)
class Record:
    """One entry, and its position in a log."""

    owner: str
    """The log's owner."""
    index: int
    entry: Entry


@dataclass
class Totals:
    """One worker's record over the run."""

    accepted: int = 0
    refused: int = 0
    quarantined: int = 0
    groups: int = 0
    """Credited groups."""
    samples: int = 0
    """Credited samples."""


@dataclass(frozen=True)
class LedgerState:
    """The state of a run according to the logs. Every mapping is sorted by its keys."""

    verdicts: Mapping[bytes, Judged]
    """The final verdict on each submission."""
    judges: Mapping[bytes, str]
    """The validator of the final verdict, by submission."""
    credits: Mapping[bytes, Judged]
    """The final verdict on each credited submission: one accepted or quarantined submission per
    number."""
    consumed: Mapping[bytes, list[Outcome]]
    """The outcome of each group, by submission."""
    totals: Mapping[str, Totals]
    """Totals by worker."""


def is_disputed(records: Iterable[Record]) -> bool:
    """Whether several of these verdicts judge one submission or one number.

    Then the trainers' `Consumed` entries may decide which verdict is final.
    """
    judged = [record.entry for record in records if isinstance(record.entry, Judged)]
    submissions = {entry.submission for entry in judged}
    numbers = {(entry.worker, entry.lineage, entry.step, entry.number) for entry in judged}
    return min(len(submissions), len(numbers)) < len(judged)


def ledger_state(
    records: Iterable[Record], *, validators: Sequence[str], trusted: Sequence[str]
) -> LedgerState:
    """Compute the state from `records`; `validators` are in order of rank.

    Only entries that a peer may write are used: verdicts of `validators`, outcomes of `trusted`
    peers. Of each validator, the first verdict on a submission is used, or the first that
    rests on a recomputation; `swarm.ledger.ruling` decides which validator's is final.

    Of several submissions with one number, only one is credited: a submission of which a step took
    a group, else the submission whose validator is first in rank.
    """
    rank = {validator: index for index, validator in enumerate(validators)}
    cases, consumed = _cases_and_outcomes(records, rank, trusted)
    verdicts: dict[bytes, Judged] = {}
    judges: dict[bytes, str] = {}
    totals: dict[str, Totals] = {}
    claims: dict[tuple[str, int, int, int], tuple[bool, int, bytes]] = {}
    """The best accepted or quarantined submission, by (worker, lineage, step, number)."""
    for (submission, worker), by_validator in sorted(cases.items()):
        trained = not _TAKEN.isdisjoint(consumed.get(submission, ()))
        judge = ruling.final(by_validator, validators, taken=trained)
        final = by_validator[judge]
        held = verdicts.get(submission)
        if held is None or (held.outcome == "refused" and final.outcome != "refused"):
            verdicts[submission], judges[submission] = final, judge
        total = totals.setdefault(worker, Totals())
        setattr(total, final.outcome, getattr(total, final.outcome) + 1)
        if final.outcome != "refused":
            number = (worker, final.lineage, final.step, final.number)
            claim = (not trained, rank[judge], submission)
            claims[number] = min(claim, claims.get(number, claim))
    credited = sorted({submission for _, _, submission in claims.values()})
    credits = {submission: verdicts[submission] for submission in credited}
    for final in credits.values():
        totals[final.worker].groups += final.groups
        totals[final.worker].samples += final.samples
    return LedgerState(
        verdicts, judges, credits, dict(sorted(consumed.items())), dict(sorted(totals.items()))
    )


_Cases = dict[tuple[bytes, str], dict[str, Judged]]
"""Verdicts by validator, of each submission and worker: a worker may submit a copy of another's
file."""


def _cases_and_outcomes(
    records: Iterable[Record], validators: Container[str], trusted: Container[str]
) -> tuple[_Cases, dict[bytes, list[Outcome]]]:
    """Collect the verdicts on each submission, and the outcomes of its groups."""
    cases: _Cases = {}
    consumed: dict[bytes, list[Outcome]] = {}
    for record in sorted(records, key=lambda record: (record.owner, record.index)):
        entry = record.entry
        if record.owner not in trusted:
            continue
        if isinstance(entry, Judged) and record.owner in validators:
            by_validator = cases.setdefault((entry.submission, entry.worker), {})
            held = by_validator.setdefault(record.owner, entry)
            if ruling.supersedes(entry, held):
                by_validator[record.owner] = entry
        elif isinstance(entry, Consumed):
            _merge(consumed, entry)
    return cases, consumed


_TAKEN: frozenset[Outcome] = frozenset({"consumed", "zero-advantage"})
"""Outcomes that mean that a step took the group. Stale and unreadable groups are never taken,
carried groups not yet."""

_FINALITY: dict[Outcome, int] = {
    "carried": 0,
    "stale": 1,
    "unreadable": 2,
    "zero-advantage": 3,
    "consumed": 4,
}


def _merge(consumed: dict[bytes, list[Outcome]], entry: Consumed) -> None:
    """Add an entry; of several outcomes of a group, the most final wins.

    A group may be carried first and consumed later.
    """
    held = consumed.get(entry.submission, [])
    longest = max(len(held), len(entry.outcomes))
    consumed[entry.submission] = [
        max(
            [*held[group : group + 1], *entry.outcomes[group : group + 1]],
            key=_FINALITY.__getitem__,
        )
        for group in range(longest)
    ]
