"""A run's state, computed as a pure function of the union of the trusted peers' logs.

The order of the entries and repeated entries do not change the state. So no trusted peer has to
agree with another before it writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.envelope import Dropped, Envelope, open_envelope
from swarm.ledger.entries import Consumed, Entry, Evicted, Judged, Outcome, Reinstated
from swarm.messages import Eviction, Reinstatement


@dataclass(frozen=True)
class Record:
    """One entry, and its position in a log."""

    owner: str
    """The log's owner."""
    index: int
    entry: Entry


@dataclass(frozen=True)
class Credit:
    """The groups and samples credited to a worker for one submission."""

    worker: str
    groups: int
    samples: int


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
    outcomes: dict[Outcome, int] = field(default_factory=dict)
    """Number of accepted groups by outcome."""


@dataclass(frozen=True)
class LedgerState:
    """The state of a run according to the logs. Every mapping is sorted by its keys."""

    verdicts: Mapping[bytes, Judged]
    """The final verdict on each submission."""
    judges: Mapping[bytes, str]
    """The validator of the final verdict, by submission."""
    credits: Mapping[bytes, Credit]
    """Credits by submission; one per number, for a final verdict of accepted or quarantined."""
    consumed: Mapping[bytes, list[Outcome]]
    """The outcome of each group, by submission."""
    evicted: Mapping[str, Eviction]
    """Evictions in force, by peer."""
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
    records: Iterable[Record], *, run: str, validators: Sequence[str], trusted: Sequence[str]
) -> LedgerState:
    """Compute the state from `records`; `validators` are in order of rank.

    Only entries that a peer may write are used: verdicts of `validators`, other entries of
    `trusted` peers, and evictions and reinstatements with valid signatures. Each validator's first
    verdict on a submission is used. These rules, in this order, decide which one is final:

    - an acceptance is final if a step took a group of the submission, since that cannot be undone;
    - a proven fault beats every other verdict;
    - among equals, the verdict of the validator first in rank is final.

    Of several submissions with one number, only one is credited: a submission of which a step took
    a group, else the submission whose validator is first in rank.
    """
    rank = {validator: index for index, validator in enumerate(validators)}
    believed = {(r.owner, r.index): r.entry for r in records if r.owner in trusted}
    cases: dict[tuple[bytes, str], dict[str, Judged]] = {}
    """By submission and worker, because a worker may submit a copy of another's file."""
    consumed: dict[bytes, list[Outcome]] = {}
    evictions: dict[str, Envelope] = {}
    reinstatements: dict[str, Envelope] = {}
    for (owner, _), entry in sorted(believed.items(), key=lambda item: item[0]):
        if isinstance(entry, Judged) and owner in rank:
            case = cases.setdefault((entry.submission, entry.worker), {})
            case.setdefault(owner, entry)
        elif isinstance(entry, Consumed):
            _merge(consumed, entry)
        elif isinstance(entry, Evicted):
            _newest(evictions, entry, run, owner, Eviction)
        elif isinstance(entry, Reinstated):
            _newest(reinstatements, entry, run, run.partition("/")[0], Reinstatement)

    verdicts: dict[bytes, Judged] = {}
    judges: dict[bytes, str] = {}
    credits: dict[bytes, Credit] = {}
    credited: dict[tuple[str, int, int, int], tuple[bool, int, bytes]] = {}
    """The best accepted or quarantined submission, by (worker, lineage, step, number)."""
    totals: dict[str, Totals] = {}
    for (submission, _), by_validator in sorted(cases.items()):
        trained = not _TAKEN.isdisjoint(consumed.get(submission, ()))
        judge = _judge(by_validator, rank, trained=trained)
        final = by_validator[judge]
        held = verdicts.get(submission)
        if held is None or (held.outcome == "refused" and final.outcome != "refused"):
            verdicts[submission] = final
            judges[submission] = judge
        total = totals.setdefault(final.worker, Totals())
        setattr(total, final.outcome, getattr(total, final.outcome) + 1)
        if final.outcome != "refused":
            number = (final.worker, final.lineage, final.step, final.number)
            claim = (not trained, rank[judge], submission)
            credited[number] = min(claim, credited.get(number, claim))
    for submission, final in verdicts.items():
        total = totals[final.worker]
        for outcome in consumed.get(submission, ()):
            total.outcomes[outcome] = total.outcomes.get(outcome, 0) + 1
    for submission in sorted({submission for _, _, submission in credited.values()}):
        final = verdicts[submission]
        credits[submission] = Credit(final.worker, final.groups, final.samples)
        totals[final.worker].groups += final.groups
        totals[final.worker].samples += final.samples
    return LedgerState(
        verdicts=verdicts,
        judges=judges,
        credits=credits,
        consumed=dict(sorted(consumed.items())),
        evicted=_in_force(evictions, reinstatements),
        totals=dict(sorted(totals.items())),
    )


def _judge(by_validator: Mapping[str, Judged], rank: Mapping[str, int], *, trained: bool) -> str:
    """The validator whose verdict on a submission is final."""
    return min(
        by_validator,
        key=lambda owner: (
            not (trained and by_validator[owner].outcome == "accepted"),
            not by_validator[owner].proven_fault,
            rank[owner],
        ),
    )


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


def _newest(
    held: dict[str, Envelope],
    entry: Evicted | Reinstated,
    run: str,
    signer: str,
    message_type: type[Eviction] | type[Reinstatement],
) -> None:
    """Keep the newest message about each peer; ignore a message without a valid signature."""
    try:
        envelope = open_envelope(entry.envelope)
    except Dropped:
        return
    message = envelope.message
    if not isinstance(message, message_type) or message.peer != entry.peer:
        return
    if envelope.sender != signer or envelope.body.run != run:
        return
    old = held.get(entry.peer)
    if old is None or _moment(old) < _moment(envelope):
        held[entry.peer] = envelope


def _moment(envelope: Envelope) -> tuple[int, bytes]:
    return (envelope.body.issued_ms, envelope.digest)


def _in_force(
    evictions: Mapping[str, Envelope], reinstatements: Mapping[str, Envelope]
) -> dict[str, Eviction]:
    in_force: dict[str, Eviction] = {}
    for peer, envelope in sorted(evictions.items()):
        back = reinstatements.get(peer)
        if back is None or back.body.issued_ms <= envelope.body.issued_ms:
            assert isinstance(envelope.message, Eviction)
            in_force[peer] = envelope.message
    return in_force
