"""A run's state, computed as a pure function of the union of the trusted peers' logs.

The order of the entries and repeated entries do not change the state. So no trusted peer has to
agree with another before it writes."""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarm.ledger import entries as log_entries
from swarm.ledger import ruling
from swarm.ledger.record import Rules, Standing, Work, refutation
from swarm.wire.envelope import Envelope, readable
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import Eviction, Reinstatement


@dataclass(frozen=True)
class Record:
    """One entry, and its position in a log."""

    owner: str
    index: int
    entry: log_entries.Entry


@dataclass(frozen=True)
class Authority:
    """Who may write what into the logs, and the rules of workers' records."""

    owners: Sequence[str]
    """The run's owners, the first one first. Reinstatements that one of them signed count: trusted
    peers log only those of the owner of the time."""
    validators: Sequence[str]
    """In order of rank."""
    trusted: Sequence[str]
    rules: Rules
    run: str
    """The run's id, which signed evictions and reinstatements name."""

    @classmethod
    def of(cls, owners: tuple[str, ...], manifest: RunManifest) -> "Authority":
        """The authority that a manifest gives, in a run that had these owners."""
        return cls(
            owners,
            manifest.validator_ids(),
            manifest.trusted_ids(),
            Rules.of(manifest),
            f"{owners[0]}/{manifest.name}",
        )


@dataclass
class Totals:
    """One worker's record over the run."""

    accepted: int = 0
    refused: int = 0
    quarantined: int = 0
    groups: int = 0
    samples: int = 0
    verified: int = 0
    """Credited tokens that were recomputed."""
    held: int = 0
    """Credited tokens that an eviction would void."""
    final: int = 0
    """Credited tokens that nothing voids any more."""
    void: int = 0
    """Tokens whose credit an eviction or a fine voided."""


@dataclass(frozen=True)
class Frontier:
    """The newest sealed submissions: of this lineage and earlier ones, up to this step."""

    lineage: int = -1
    step: int = -1

    def covers(self, entry: log_entries.Judged) -> bool:
        """Whether the submission of a verdict is sealed."""
        return entry.lineage <= self.lineage and entry.step <= self.step


@dataclass(frozen=True)
class Base:
    """The state of a run's sealed epochs."""

    frontier: Frontier = Frontier()
    totals: Mapping[str, Totals] = field(default_factory=dict)
    """Final totals by worker."""


@dataclass(frozen=True)
class LedgerState:
    """The state of a run according to the logs. Every mapping is sorted by its keys."""

    verdicts: Mapping[bytes, log_entries.Judged]
    """The final verdict on each submission."""
    judges: Mapping[bytes, str]
    """The validator of the final verdict, by submission."""
    credits: Mapping[bytes, log_entries.Judged]
    """The final verdict on each credited submission, accepted or quarantined: one per number."""
    standings: Mapping[bytes, Standing]
    """The standing of each credited submission."""
    consumed: Mapping[bytes, list[log_entries.Outcome]]
    """The outcome of each group, by submission."""
    works: Mapping[str, Work]
    """The submissions that decide each worker's record."""
    tallies: Mapping[str, ruling.Tally]
    """Figures by validator, which show one that judges unlike the others."""
    totals: Mapping[str, Totals]


def ledger_state(
    records: Iterable[Record],
    authority: Authority,
    *,
    newest: tuple[int, int] = (0, 0),
    base: Base | None = None,
    until: Frontier | None = None,
) -> LedgerState:
    """Compute the state from `records`.

    Only entries that a peer may write are used: verdicts of validators, outcomes and evictions of
    trusted peers, the owner's reinstatements. Of each validator, the first verdict on a submission
    is used, or the first that rests on a recomputation; `swarm.ledger.ruling` decides among
    validators.

    A submission that was recomputed and refused is not credited, even if a step took its groups. Of
    several submissions with one number, only one is credited: a submission of which a step took a
    group, else the submission whose validator is first in rank.

    `newest` is the newest (lineage, step) that is known besides the records. With a `base`,
    verdicts on sealed submissions are left out, and the totals begin with the sealed ones. `until`
    leaves the submissions beyond it out of the totals."""
    base = base or Base()
    rank = {validator: index for index, validator in enumerate(authority.validators)}
    found = _sorted_out(records, rank, authority.trusted, base.frontier)
    verdicts: dict[bytes, log_entries.Judged] = {}
    judges: dict[bytes, str] = {}
    totals: defaultdict[str, Totals] = defaultdict(Totals)
    totals.update((worker, replace(total)) for worker, total in base.totals.items())
    claims: dict[tuple[str, int, int, int], tuple[bool, int, bytes]] = {}
    """The best accepted or quarantined submission, by (worker, lineage, step, number)."""
    refuted: defaultdict[str, list[log_entries.Judged]] = defaultdict(list)
    for (submission, worker), by_validator in sorted(found.cases.items()):
        trained = not _TAKEN.isdisjoint(found.consumed.get(submission, ()))
        judge = ruling.final(by_validator, authority.validators, taken=trained)
        final = by_validator[judge]
        # Whoever hands in a copy of another worker's file is refused; that must not hide the
        # verdict on the original.
        held = verdicts.get(submission)
        if held is None or (held.outcome == "refused" and final.outcome != "refused"):
            verdicts[submission], judges[submission] = final, judge
        if until is None or until.covers(final):
            total = totals[worker]
            setattr(total, final.outcome, getattr(total, final.outcome) + 1)
        refusal = refutation(by_validator.values(), trained=trained)
        if refusal is not None:
            refuted[worker].append(refusal)
        elif final.outcome != "refused":
            number = (worker, final.lineage, final.step, final.number)
            # The digest comes last: all readers of the logs must choose the same one.
            claim = (not trained, rank[judge], submission)
            claims[number] = min(claim, claims.get(number, claim))
    credits = {name: verdicts[name] for name in sorted({claim[2] for claim in claims.values()})}
    works = _works(credits, refuted, found.cases)
    standings = _standings(works, found, authority, newest, base.frontier)
    for submission, final in credits.items():
        # Only now: submissions beyond it compete for numbers too, and their fines void credit.
        if until is not None and not until.covers(final):
            continue
        total, tokens = totals[final.worker], final.tokens
        total.groups += final.groups
        total.samples += final.samples
        total.verified += tokens if submission in works[final.worker].verified else 0
        standing = standings[submission]
        setattr(total, standing, getattr(total, standing) + tokens)
    return LedgerState(
        verdicts,
        judges,
        credits,
        standings,
        dict(sorted(found.consumed.items())),
        works,
        ruling.tallies(found.cases.values()),
        dict(sorted(totals.items())),
    )


def _works(
    credits: Mapping[bytes, log_entries.Judged],
    refuted: Mapping[str, Sequence[log_entries.Judged]],
    cases: "_Cases",
) -> dict[str, Work]:
    by_worker: defaultdict[str, dict[bytes, log_entries.Judged]] = defaultdict(dict)
    for submission, final in credits.items():
        by_worker[final.worker][submission] = final
    works = {}
    for worker in sorted({*by_worker, *refuted}):
        checked = {
            submission: [
                entry
                for entry in cases[submission, worker].values()
                if entry.outcome == "accepted" and entry.recomputed
            ]
            for submission in by_worker[worker]
        }
        works[worker] = Work(
            credited=by_worker[worker],
            verified=frozenset(name for name, entries in checked.items() if entries),
            refuted=tuple(refuted.get(worker, ())),
            observed=frozenset(
                name
                for name, entries in checked.items()
                if not any(entry.evidence.sampler for entry in entries)
            ),
        )
    return works


def _standings(
    works: Mapping[str, Work],
    found: "_Sorted",
    authority: Authority,
    newest: tuple[int, int],
    sealed: Frontier,
) -> dict[bytes, Standing]:
    newest_step = max(newest, found.newest)[1]
    standings: dict[bytes, Standing] = {}
    for worker, work in works.items():
        eviction = _eviction_in_force(worker, found.expulsions.get(worker, ()), authority)
        evicted_at = None
        if eviction is not None:
            submission = eviction.expect(Eviction).submission
            case = found.cases.get((submission, worker), {})
            # An eviction whose case is sealed was before all submissions that are not.
            unknown = sealed.step if eviction.raw in found.carried else newest_step
            evicted_at = min((entry.step for entry in case.values()), default=unknown)
        standings |= work.standings(newest_step, evicted_at, authority.rules)
    return dict(sorted(standings.items()))


def _eviction_in_force(
    worker: str, envelopes: Iterable[bytes], authority: Authority
) -> Envelope | None:
    """A worker's newest eviction, unless its newest reinstatement is newer.

    An entry of a log may hold any bytes, so only the signed message says whom it is about."""
    # Sorted, and `>=` below: of two signed in the same millisecond all readers take the same one.
    newest: Envelope | None = None
    for envelope in readable(sorted(envelopes)):
        message = envelope.message
        allowed = (
            isinstance(message, (Eviction, Reinstatement))
            and (message.peer, envelope.body.run) == (worker, authority.run)
            and envelope.sender
            in (authority.trusted if isinstance(message, Eviction) else authority.owners)
        )
        if allowed and (newest is None or envelope.body.issued_ms >= newest.body.issued_ms):
            newest = envelope
    return newest if newest and isinstance(newest.message, Eviction) else None


_Cases = dict[tuple[bytes, str], dict[str, log_entries.Judged]]
"""By submission, worker (who may submit a copy of another's file) and validator."""


@dataclass(frozen=True)
class _Sorted:
    """The entries of the logs that count, sorted out."""

    cases: _Cases
    consumed: dict[bytes, list[log_entries.Outcome]]
    """The outcome of each group, by submission."""
    expulsions: dict[str, set[bytes]]
    """Signed evictions and reinstatements, by peer."""
    newest: tuple[int, int]
    """The newest (lineage, step) that was judged."""
    carried: set[bytes]
    """Signed expulsions that seals carry on."""


def _sorted_out(
    records: Iterable[Record], validators: Container[str], trusted: Container[str], sealed: Frontier
) -> _Sorted:
    """Collect the verdicts and outcomes of unsealed submissions, and the expulsions."""
    cases: _Cases = {}
    consumed: dict[bytes, list[log_entries.Outcome]] = {}
    expulsions: defaultdict[str, set[bytes]] = defaultdict(set)
    carried: set[bytes] = set()
    newest = (0, 0)
    for record in sorted(records, key=lambda record: (record.owner, record.index)):
        entry = record.entry
        if record.owner not in trusted:
            continue
        if isinstance(entry, log_entries.Carried):
            entry = log_entries.decode(entry.entry)
            carried |= {entry.envelope} if isinstance(entry, log_entries.Evicted) else set()
        if isinstance(entry, log_entries.Judged) and record.owner in validators:
            newest = max(newest, (entry.lineage, entry.step))
            if sealed.covers(entry):
                continue
            by_validator = cases.setdefault((entry.submission, entry.worker), {})
            held = by_validator.setdefault(record.owner, entry)
            if ruling.supersedes(entry, held):
                by_validator[record.owner] = entry
        elif isinstance(entry, log_entries.Consumed):
            _merge(consumed, entry)
        elif isinstance(entry, (log_entries.Evicted, log_entries.Reinstated)):
            expulsions[entry.peer].add(entry.envelope)
    return _Sorted(cases, consumed, expulsions, newest, carried)


_TAKEN: frozenset[log_entries.Outcome] = frozenset({"consumed", "zero-advantage"})
"""Outcomes of groups that a step took. Stale and unreadable ones never are, carried not yet."""

_FINALITY: dict[log_entries.Outcome, int] = {
    "carried": 0,
    "stale": 1,
    "unreadable": 2,
    "zero-advantage": 3,
    "consumed": 4,
}


def _merge(consumed: dict[bytes, list[log_entries.Outcome]], entry: log_entries.Consumed) -> None:
    """Add an entry; of several outcomes of a group the most final wins (carried, then consumed)."""
    held = consumed.get(entry.submission, [])
    longest = max(len(held), len(entry.outcomes))
    consumed[entry.submission] = [
        max(
            [*held[group : group + 1], *entry.outcomes[group : group + 1]],
            key=_FINALITY.__getitem__,
        )
        for group in range(longest)
    ]
