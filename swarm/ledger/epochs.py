"""Epochs of the logs: what a seal says, computed from the entries alone (decision 41).

A seal is a block of entries at the end of a log: the `Carried` entries of the epoch that stay in
force, one `SealedWorker` for each worker, and `Sealed`. It follows from the entries before it, so
whoever holds them finds the same bytes. Submissions are sealed once their credit is final."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import msgspec
from blake3 import blake3

from swarm.ledger import entries
from swarm.ledger.capital import Capitals
from swarm.ledger.state import Authority, Base, Frontier, Record, Totals, ledger_state

_TOTALS = tuple(each.name for each in fields(Totals) if each.name != "held")
"""Sealed credit is final or void, never held."""


def frontier_of(seal: entries.Sealed) -> Frontier:
    """The newest submissions that a seal covers."""
    return Frontier(seal.lineage, seal.step)


def rules_digest(authority: Authority) -> bytes:
    """Names the validators and rules by which totals are computed."""
    rules = authority.rules
    peers = [" ".join(authority.owners), authority.validators, authority.trusted]
    named = msgspec.msgpack.encode([*peers, rules.safety, authority.run])
    return blake3(named + msgspec.msgpack.encode([rules.stake_steps, rules.hold_steps])).digest()


def totals_digest(totals: Mapping[str, Totals]) -> bytes:
    hasher = blake3()
    for worker, total in sorted(totals.items()):
        hasher.update(entries.encode(_sealed_worker(worker, total)))
    return hasher.digest()


def first_needed(log: Iterable[Record], frontier: Frontier) -> int | None:
    """Index of the first entry of a log that is not about sealed submissions; None if all are."""
    for record in log:
        entry = record.entry
        if isinstance(entry, (entries.Judged, entries.CheckpointPublished)):
            needed = entry.lineage > frontier.lineage or entry.step > frontier.step
        elif isinstance(
            entry, entries.Consumed
        ):  # a step consumes its own submissions and earlier ones
            needed = entry.step > frontier.step
        else:
            needed = False
        if needed:
            return record.index
    return None


def _block(log: Sequence[Record], seal: entries.Sealed) -> list[entries.Entry]:
    at = next((place for place, record in enumerate(log) if record.entry is seal), 0)
    return [record.entry for record in log[at - seal.block : at]] if at >= seal.block else []


def _workers(block: Iterable[entries.Entry]) -> Iterator[tuple[str, Totals]]:
    for entry in block:
        if isinstance(entry, entries.SealedWorker):
            yield entry.worker, Totals(**{name: getattr(entry, name) for name in _TOTALS})


def _sealed_worker(
    worker: str, total: Totals, capitals: Sequence[entries.SealedCapital] = ()
) -> entries.SealedWorker:
    counts = {name: getattr(total, name) for name in _TOTALS}
    return entries.SealedWorker(worker=worker, **counts, capitals=list(capitals))


def capitals_before(log: Sequence[Record]) -> dict[str, list[entries.SealedCapital]]:
    """The capitals of the entries that are pruned from this log, by worker; empty without."""
    for record in log:
        seal = record.entry
        covered = seal.log(record.owner) if isinstance(seal, entries.Sealed) else None
        if isinstance(seal, entries.Sealed) and covered and covered.first == log[0].index > 0:
            block = _block(log, seal)
            return {e.worker: e.capitals for e in block if isinstance(e, entries.SealedWorker)}
    return {}


def base_of(logs: Iterable[Sequence[Record]], trusted: Sequence[str]) -> Base:
    """The newest sealed state on which more than half of the trusted peers agree.

    Empty if no log is pruned: then all that counts is in the entries."""
    held = [log for log in logs if log and log[0].owner in trusted]
    if all(log[0].index == 0 for log in held):
        return Base()
    # One vote for each log, however often it repeats a seal.
    votes = Counter(said for log in held for said in {stated(seal) for _, seal in seals_in(log)})
    agreed = [
        ((seal.epoch, seal.lineage, seal.step), at, log)
        for log in held
        for at, seal in seals_in(log)
        if votes[stated(seal)] > len(trusted) // 2
    ]
    for _, at, log in sorted(agreed, key=lambda each: each[0], reverse=True):
        base = base_at(log, at)
        if base is not None:
            return base
    return Base()


def seals_in(log: Sequence[Record]) -> list[tuple[int, entries.Sealed]]:
    return [(at, r.entry) for at, r in enumerate(log) if isinstance(r.entry, entries.Sealed)]


def base_at(log: Sequence[Record], at: int) -> Base | None:
    """The state that the seal at a place carries; None unless it is here and matches its digest."""
    seal = log[at].entry
    assert isinstance(seal, entries.Sealed)
    totals = dict(_workers(record.entry for record in log[max(0, at - seal.block) : at]))
    if seal.block > at or totals_digest(totals) != seal.totals:
        return None
    return Base(frontier_of(seal), totals)


def stated(seal: entries.Sealed) -> bytes:
    """What a seal says of the run: equal for all peers that agree."""
    return entries.encode(msgspec.structs.replace(seal, block=0))


@dataclass(frozen=True)
class Epoch:
    """What is sealed of the whole run; the same for all trusted peers."""

    number: int
    frontier: Frontier
    logs: Sequence[entries.SealedLog]
    rules: bytes
    totals: Mapping[str, Totals]

    @classmethod
    def computed(
        cls,
        number: int,
        frontier: Frontier,
        logs: Mapping[str, tuple[int, Sequence[Record]]],
        roots: Mapping[str, bytes],
        authority: Authority,
        base: Base,
    ) -> "Epoch":
        """Compute an epoch from the sizes and entries of all logs, and the state of the last."""
        newest = (frontier.lineage, frontier.step + authority.rules.hold_steps)
        records = [record for _, log in logs.values() for record in log]
        state = ledger_state(records, authority, newest=newest, base=base, until=frontier)
        totals = {}
        for worker, total in state.totals.items():
            total.final, total.held = total.final + total.held, 0
            if total.accepted or total.quarantined:
                totals[worker] = total
        covered = []
        for owner, (size, log) in sorted(logs.items()):
            first = first_needed(log, frontier)
            covered.append(
                entries.SealedLog(
                    owner=owner,
                    size=size,
                    root=roots[owner],
                    first=size if first is None else first,
                )
            )
        return cls(number, frontier, covered, rules_digest(authority), totals)

    @classmethod
    def stated_by(cls, seal: entries.Sealed, base: Base) -> "Epoch":
        """The epoch of a seal, with the totals of its block."""
        return cls(seal.epoch, base.frontier, seal.logs, seal.rules, base.totals)

    def block(self, log: Sequence[Record], owner: str) -> list[entries.Entry]:
        """The block of entries that seals `owner`'s log, of which `log` are the covered ones."""
        covered = next(each for each in self.logs if each.owner == owner)
        carried = [
            entries.Carried(position=index, entry=raw)
            for raw, index in _lasting(log, covered.first).items()
        ]
        capitals = _capitals(log, owner, covered.first)
        workers = [
            _sealed_worker(worker, total, capitals.get(worker, Capitals()).sealed())
            for worker, total in sorted(self.totals.items())
        ]
        seal = entries.Sealed(
            epoch=self.number,
            lineage=self.frontier.lineage,
            step=self.frontier.step,
            logs=list(self.logs),
            rules=self.rules,
            totals=totals_digest(self.totals),
            block=len(carried) + len(workers),
        )
        return [*carried, *workers, seal]


def _lasting(log: Sequence[Record], first: int) -> dict[bytes, int]:
    """Index of each entry before `first` that stays in force, by its bytes, in order."""
    found: dict[bytes, int] = {}
    for record in log:
        if isinstance(record.entry, entries.Carried):
            found.setdefault(record.entry.entry, record.entry.position)
        elif isinstance(record.entry, entries.LASTING) and record.index < first:
            found.setdefault(entries.encode(record.entry), record.index)
    return dict(sorted(found.items(), key=lambda each: each[1]))


def _capitals(log: Sequence[Record], owner: str, first: int) -> dict[str, Capitals]:
    """Each worker's capitals from the entries before `first`.

    They begin with the newest seal that does not go beyond `first`: after a rollback, a seal that
    the peers did not agree on may name a later entry than the one that follows it."""
    found: defaultdict[str, Capitals] = defaultdict(Capitals)
    start = 0
    for _, seal in reversed(seals_in(log)):
        covered = seal.log(owner)
        if covered is not None and covered.first <= first:
            start = covered.first
            for entry in _block(log, seal):
                if isinstance(entry, entries.SealedWorker):
                    found[entry.worker] = Capitals.unsealed(entry.capitals)
            break
    for record in log:
        entry = record.entry
        if not start <= record.index < first:
            continue
        if isinstance(entry, entries.Judged):
            found[entry.worker].add(entry.evidence)
        elif isinstance(entry, entries.Reinstated):
            found.pop(entry.peer, None)
    return found


def records_of(owner: str, start: int, raws: Iterable[bytes]) -> list[Record]:
    """The entries of a log from index `start` on; raises `ValueError` for a malformed one."""
    return [Record(owner, index, entries.decode(raw)) for index, raw in enumerate(raws, start)]
