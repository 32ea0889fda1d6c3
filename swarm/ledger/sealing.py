"""Sealing and pruning the logs in a trusted peer's database; the seals it may make (decision 41).

Every function is one transaction. Sealing computes the totals of all entries of the epoch: about a
second for 20,000 entries, in which appends wait. A second vote in an epoch needs that the first is
*lost*, and that the second's maker had seen it (Paxos: Lamport, "The Part-Time Parliament",
1998)."""

import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from swarm.errors import SwarmError
from swarm.ledger import epochs
from swarm.ledger.derived import deriving, prune
from swarm.ledger.entries import Sealed, SealedLog, decode, encode
from swarm.ledger.epochs import Epoch, rules_digest
from swarm.ledger.log import Log
from swarm.ledger.state import Authority, Base, Frontier, Record
from swarm.world import Database


@dataclass(frozen=True)
class Place:
    """A seal in a log."""

    owner: str
    position: int
    epoch: int
    stated: bytes
    """`swarm.ledger.epochs.stated`."""

    @cached_property
    def says(self) -> Sealed:
        """What the seal says of the run, without what only its own log says."""
        seal = decode(self.stated)
        assert isinstance(seal, Sealed)
        return seal


Seals = Mapping[str, Sequence[Place]]
"""The seals in each log, the oldest first."""


def voters(seals: Seals, stated: bytes, trusted: Sequence[str]) -> list[str]:
    """The trusted peers that have sealed the same."""
    return [peer for peer in trusted if any(p.stated == stated for p in seals.get(peer, ()))]


def agreed(seals: Seals, place: Place, trusted: Sequence[str]) -> bool:
    """Whether more than half of the trusted peers have sealed the same."""
    return len(voters(seals, place.stated, trusted)) > len(trusted) // 2


def newest_agreed(seals: Seals, trusted: Sequence[str], before: float = math.inf) -> Place | None:
    """The newest seal of an epoch `before` another that most of the trusted peers have made."""
    places = [place for owner in trusted for place in seals.get(owner, ())]
    found = [p for p in places if p.epoch < before and agreed(seals, p, trusted)]
    return max(found, key=lambda p: (p.epoch, p.says.lineage, p.says.step, p.stated), default=None)


def prunable(seals: Seals, own: Place, trusted: Sequence[str]) -> bool:
    """Whether what an epoch seals may be pruned: all trusted peers have sealed it, or more than
    half have sealed it and a later one."""
    if len(voters(seals, own.stated, trusted)) == len(trusted):
        return True
    later = [place for log in seals.values() for place in log if place.epoch > own.epoch]
    return agreed(seals, own, trusted) and any(agreed(seals, p, trusted) for p in later)


def is_lost(seals: Seals, place: Place, authority: Authority) -> bool:
    """Whether more than half of the trusted peers can never make a seal: so many have chosen
    another one for its epoch, or the owner has changed the trusted peers or the rules since."""
    says, trusted = place.says, authority.trusted
    if says.rules != rules_digest(authority) or [x.owner for x in says.logs] != sorted(trusted):
        return True
    # Whoever has not voted may still make it, however long silent: the vote may be under way.
    # Otherwise the seal given up and its successor could both win.
    elsewhere = sum(_chose_another(seals.get(peer, ()), place, peer) for peer in trusted)
    return len(trusted) - elsewhere <= len(trusted) // 2


def _chose_another(log: Sequence[Place], place: Place, owner: str) -> bool:
    """Whether a peer has made a seal that this one does not cover, and so never makes this one."""
    covered = place.says.log(owner)
    if covered is None or any(made.stated == place.stated for made in log):
        return False
    # A vote before `covered.size` bars nothing: the seal's maker had seen it, so its owner may
    # follow (`may_follow`). A vote for a later epoch bars too: nobody goes back to an earlier one.
    return any(made.epoch >= place.epoch and made.position >= covered.size for made in log)


def may_follow(seals: Seals, me: str, theirs: Place, authority: Authority) -> bool:
    """Whether this peer, by what it has sealed itself, may seal what another one has sealed."""
    mine = [place for place in seals.get(me, ()) if place.epoch >= theirs.epoch]
    covered = theirs.says.log(me)
    # `covered.size`: their seal's maker had seen this peer's vote, so votes that cross on the wire
    # move nobody. `is_lost`: half of the peers or more have voted otherwise, so no peer alone can
    # make this one vote again.
    return covered is not None and all(
        made.epoch == theirs.epoch
        and made.stated != theirs.stated
        and made.position < covered.size
        and is_lost(seals, made, authority)
        for made in mine
    )


def adoptable(seals: Seals, epoch: int, authority: Authority) -> list[Place]:
    """The seals of an epoch that more than half of the trusted peers may still make, those with
    the most votes first, each once."""
    trusted = authority.trusted
    # In reverse, so that of equal seals the one of the first trusted peer is kept.
    found = {
        place.stated: place
        for owner in reversed(trusted)
        for place in seals.get(owner, ())
        if place.epoch == epoch and not is_lost(seals, place, authority)
    }
    return sorted(found.values(), key=lambda p: (-len(voters(seals, p.stated, trusted)), p.stated))


SEALS_MAX = 64
"""Seals of a log that are looked at. An honest log has one or two of each epoch that is not pruned;
one with thousands would cost every other trusted peer seconds at each look."""


class FalseSeal(SwarmError):
    """Peer `owner` sealed for `epoch` something else than follows from the logs."""

    def __init__(self, owner: str, epoch: int, reason: str) -> None:
        super().__init__(reason)
        self.owner = owner
        self.epoch = epoch


class Books:
    """The logs in one database, as this trusted peer (`me`) holds them."""

    def __init__(self, database: Database, me: str) -> None:
        self._database = database
        self._me = me

    def seals(self) -> dict[str, list[Place]]:
        """The newest `SEALS_MAX` seals in each log that has one, the oldest first."""
        found: dict[str, list[Place]] = {}
        rows = self._database.read(
            "SELECT owner, position, epoch, stated FROM (SELECT *, ROW_NUMBER() OVER "
            "(PARTITION BY owner ORDER BY position DESC) AS age FROM seals) WHERE age <= ? "
            "ORDER BY owner, position",
            (SEALS_MAX,),
        )
        for row in rows:
            found.setdefault(row[0], []).append(Place(*row))
        return found

    def seal_at(self, place: Place) -> Sealed:
        (raw,) = Log(self._database, place.owner).entries(place.position, 1)
        seal = decode(raw)
        assert isinstance(seal, Sealed)
        return seal

    def holds(self, covered: SealedLog) -> bool:
        """Whether this peer can check what a seal says of a log: it holds all entries that the
        seal covers and an earlier one did not."""
        log = Log(self._database, covered.owner)
        return log.start() <= covered.size <= log.size()

    def sizes(self, owners: Sequence[str]) -> dict[str, int]:
        """Entries of each of these logs, those that are pruned included."""
        return {owner: Log(self._database, owner).size() for owner in owners}

    def growth(self, sizes: Mapping[str, int], seal: Sealed | None, seals: Seals) -> int:
        """Entries of all logs together, of these sizes, that a seal does not cover.

        The seals' own blocks do not count: with many workers they alone would fill an epoch, and
        each seal would make the next one due."""
        covered = {log.owner: log.size for log in seal.logs} if seal is not None else {}
        found = sum(max(0, size - covered.get(owner, 0)) for owner, size in sizes.items())
        for owner, places in seals.items():
            first = covered.get(owner, 0)
            for place in places:
                if first <= place.position < sizes.get(owner, 0):
                    found -= min(self.seal_at(place).block, place.position - first) + 1
        return found

    async def seal(
        self, number: int, frontier: Frontier, authority: Authority, previous: Place | None
    ) -> tuple[range, Sealed]:
        """Compute and append the next epoch's seal to the own log; returns its block's indices."""

        def run(connection: sqlite3.Connection) -> tuple[range, Sealed]:
            sizes = {
                owner: Log(self._database, owner).size(connection) for owner in authority.trusted
            }
            epoch, logs = self._computed(
                connection, number, frontier, sizes, authority, self._base(connection, previous)
            )
            return self._append(connection, epoch, logs[self._me])

        return await self._database.transact(run)

    async def countersign(
        self, place: Place, previous: Place | None, authority: Authority
    ) -> tuple[range, Sealed]:
        """Compute the epoch of another's seal, and append the same seal, or raise `FalseSeal`."""

        def run(connection: sqlite3.Connection) -> tuple[range, Sealed]:
            seal = self._seal_within(connection, place)
            sizes = {log.owner: log.size for log in seal.logs}
            base, frontier = self._base(connection, previous), epochs.frontier_of(seal)
            epoch, logs = self._computed(connection, seal.epoch, frontier, sizes, authority, base)
            own = epoch.block(logs[self._me], self._me)[-1]
            assert isinstance(own, Sealed)
            # What is appended is this peer's own result, never a copy of what the other one says.
            if epochs.stated(own) != place.stated:
                raise FalseSeal(place.owner, place.epoch, _difference(seal, own))
            return self._append(connection, epoch, logs[self._me])

        return await self._database.transact(run)

    async def prune(self, place: Place, own: Place) -> int:
        """Delete what a seal covers of its log, if its block follows from that log and from the
        `own` seal of the epoch; return how many entries. Raises `FalseSeal`."""

        def run(connection: sqlite3.Connection) -> int:
            log, seal = Log(self._database, place.owner), self._seal_within(connection, place)
            covered = seal.log(place.owner)
            if covered is None or covered.first <= log.start(connection):
                return 0
            if place.owner != self._me:
                mine = self._seal_within(connection, own)
                epoch = Epoch.stated_by(mine, self._base(connection, own))
                records = self._records(connection, place.owner, covered.size)
                expected = [encode(entry) for entry in epoch.block(records, place.owner)]
                start = place.position - seal.block
                if expected != self._raws(connection, place.owner, start, place.position + 1):
                    raise FalseSeal(
                        place.owner, place.epoch, "what it carries on is not what its log says"
                    )
            return prune(connection, log, place.position, seal, receipts=place.owner == self._me)

        return await self._database.transact(run)

    # --- within a transaction ---

    def _append(
        self, connection: sqlite3.Connection, epoch: Epoch, log: Sequence[Record]
    ) -> tuple[range, Sealed]:
        entries = epoch.block(log, self._me)
        raws, derive = [encode(entry) for entry in entries], deriving(self._me, entries)
        written = Log(self._database, self._me).append_within(connection, raws, derive)
        seal = entries[-1]
        assert isinstance(seal, Sealed)
        return written, seal

    def _computed(
        self,
        connection: sqlite3.Connection,
        number: int,
        frontier: Frontier,
        sizes: Mapping[str, int],
        authority: Authority,
        base: Base,
    ) -> tuple[Epoch, dict[str, list[Record]]]:
        logs = {owner: self._records(connection, owner, size) for owner, size in sizes.items()}
        roots = {
            owner: Log(self._database, owner).root(size, connection)
            for owner, size in sizes.items()
        }
        covered = {owner: (sizes[owner], log) for owner, log in logs.items()}
        return Epoch.computed(number, frontier, covered, roots, authority, base), logs

    def _base(self, connection: sqlite3.Connection, place: Place | None) -> Base:
        """The state that a seal carries; raises `FalseSeal` if it is not the one it names."""
        if place is None:
            return Base()
        seal = self._seal_within(connection, place)
        start = place.position - seal.block
        raws = self._raws(connection, place.owner, start, place.position + 1)
        base = epochs.base_at(epochs.records_of(place.owner, start, raws), len(raws) - 1)
        if base is None:
            raise FalseSeal(place.owner, place.epoch, "its totals are not those of its digest")
        return base

    def _seal_within(self, connection: sqlite3.Connection, place: Place) -> Sealed:
        (raw,) = self._raws(connection, place.owner, place.position, place.position + 1)
        seal = decode(raw)
        assert isinstance(seal, Sealed)
        return seal

    def _records(self, connection: sqlite3.Connection, owner: str, size: int) -> list[Record]:
        start = Log(self._database, owner).start(connection)
        return epochs.records_of(owner, start, self._raws(connection, owner, start, size))

    def _raws(
        self, connection: sqlite3.Connection, owner: str, start: int, stop: int
    ) -> list[bytes]:
        rows = connection.execute(
            "SELECT entry FROM entries WHERE owner = ? AND position >= ? AND position < ? "
            "ORDER BY position",
            (owner, start, stop),
        )
        return [bytes(raw) for (raw,) in rows]


def _difference(seal: Sealed, own: Sealed) -> str:
    if seal.logs != own.logs:
        wrong = [
            theirs.owner
            for theirs, mine in zip(seal.logs, own.logs, strict=False)
            if theirs != mine
        ]
        return f"it covers another log of {', '.join(wrong) or 'a peer'} than is held here"
    if seal.totals != own.totals:
        return "its totals do not follow from the logs"
    return "it does not follow from the logs"
