"""Tables derived from the entries of all logs in a trusted peer's database.

The transaction that appends an entry also updates them: signed verdicts, workers' balances
(`swarm.ledger.capital`), submissions refused for all, the evidence against each worker, used
submissions, and signed evictions and reinstatements."""

import sqlite3
from collections.abc import Sequence

import msgspec

from swarm.data import statements
from swarm.ledger import capital, epochs
from swarm.ledger import redeemed_invites as invites
from swarm.ledger.entries import (
    Carried,
    Consumed,
    Entry,
    Evicted,
    Judged,
    Redeemed,
    Reinstated,
    Sealed,
    SealedCapital,
    SealedWorker,
    decode,
)
from swarm.ledger.log import Also, Log
from swarm.ledger.ruling import binds
from swarm.ledger.state import Authority
from swarm.wire.envelope import Envelope, open_envelope
from swarm.wire.messages import Evidence, Verdict
from swarm.world import Database

_TABLES = statements(__file__)


class DerivedTables:
    """The derived tables of the trusted peer `owner`."""

    def __init__(self, database: Database, owner: str) -> None:
        self._database = database
        self._owner = owner
        self._followed = b""
        """The encoded authority that the tables follow."""

    async def create(self, authority: Authority) -> None:
        """Create the tables if they do not exist; they follow `authority`."""
        raw = capital.encoded(authority)

        def create(connection: sqlite3.Connection) -> None:
            for statement in _TABLES:
                connection.execute(statement)
            capital.follow(connection, raw)

        await self._database.transact(create)
        self._followed = raw

    def follows(self, authority: Authority) -> bool:
        """Whether the tables follow an authority's validators and rules."""
        return self._followed == capital.encoded(authority)

    async def follow(self, authority: Authority) -> None:
        """Compute the balances again, by another authority."""
        raw = capital.encoded(authority)
        await self._database.transact(lambda connection: capital.follow(connection, raw))
        self._followed = raw

    def verdicts(self, newest: int) -> list[Envelope]:
        """Return the last `newest` verdicts of this peer, in log order."""
        rows = self._database.read(
            "SELECT envelope FROM (SELECT * FROM verdicts ORDER BY position DESC LIMIT ?) "
            "ORDER BY position",
            (newest,),
        )
        return [open_envelope(raw) for (raw,) in rows]

    def verdicts_of(self, worker: str, start: int, limit: int) -> list[tuple[int, bytes, bytes]]:
        """Return up to `limit` own verdicts on a worker from log index `start` on.

        Each is a tuple of log index, entry and envelope. An empty `worker` stands for all workers.
        """
        of_worker, named = ("v.worker = ? AND ", (worker,)) if worker else ("", ())
        rows = self._database.read(
            "SELECT v.position, e.entry, v.envelope FROM verdicts v JOIN entries e "
            "ON e.owner = ? AND e.position = v.position "
            f"WHERE {of_worker}v.position >= ? ORDER BY v.position LIMIT ?",
            (self._owner, *named, start, limit),
        )
        return [(position, entry, envelope) for position, entry, envelope in rows]

    def stake(self, worker: str, step: int, stake_steps: int) -> int:
        """Return a worker's stake before a submission for `step` (`swarm.ledger.record`)."""
        ((tokens,),) = self._database.read(
            "SELECT COALESCE(SUM(tokens), 0) FROM balances WHERE worker = ? AND step > ? "
            "ORDER BY 1",
            (worker, step - stake_steps),
        )
        return max(0, int(tokens))

    def reinstatements_of(self, peer: str) -> dict[str, int]:
        """Return the index of a peer's last reinstatement in each log that has one."""
        rows = self._database.read(
            "SELECT owner, MAX(position) FROM reinstated WHERE peer = ? GROUP BY owner "
            "ORDER BY owner",
            (peer,),
        )
        return {owner: position for owner, position in rows}

    def capitals_of(self, worker: str, owner: str, start: int) -> tuple[int, list[SealedCapital]]:
        """Return the capitals against a worker from the entries before those kept of `owner`'s log,
        unless a reinstatement at or after them (`start`) voids them, and the index of the first
        entry that they do not include."""
        rows = self._database.read(
            "SELECT position, capitals FROM sealed_capitals WHERE worker = ? AND owner = ? "
            "AND position >= ? ORDER BY position",
            (worker, owner, start),
        )
        if not rows:
            return 0, []
        return rows[0][0], msgspec.msgpack.decode(rows[0][1], type=list[SealedCapital])

    def starts(self) -> dict[str, int]:
        """Return where each pruned log begins."""
        return dict(self._database.read("SELECT owner, position FROM starts ORDER BY owner"))

    def evidence_on(self, worker: str, owner: str, start: int) -> list[tuple[int, Evidence]]:
        """Return the evidence against a worker in `owner`'s log from index `start` on, by index."""
        rows = self._database.read(
            "SELECT position, evidence FROM evidence "
            "WHERE worker = ? AND owner = ? AND position >= ? ORDER BY position",
            (worker, owner, start),
        )
        return [(position, msgspec.msgpack.decode(raw, type=Evidence)) for position, raw in rows]

    def is_used(self, submission: bytes) -> bool:
        """Whether a log records the final outcome of a submission; "carried" is not final."""
        return self._has("used WHERE submission = ?", submission)

    def is_refused(self, worker: str, submission: bytes) -> bool:
        """Whether a log holds a refusal of a submission that binds all validators."""
        return self._has("refused WHERE worker = ? AND submission = ?", worker, submission)

    def has_expulsion(self, raw: bytes) -> bool:
        """Whether a log has this signed eviction or reinstatement."""
        return self._has("expulsions WHERE envelope = ?", raw)

    def has_reinstatement(self, raw: bytes) -> bool:
        """Whether this peer's own log has this signed reinstatement."""
        return self._has("reinstated WHERE envelope = ? AND owner = ?", raw, self._owner)

    def _has(self, rows: str, *values: str | bytes) -> bool:
        return bool(self._database.read(f"SELECT 1 FROM {rows} ORDER BY 1", values))

    def expulsions(self) -> list[bytes]:
        """Return all signed evictions and reinstatements."""
        rows = self._database.read("SELECT envelope FROM expulsions ORDER BY envelope")
        return [raw for (raw,) in rows]


def keep_verdict(connection: sqlite3.Connection, index: int, envelope: Envelope) -> None:
    """Store a signed verdict with its index in the log."""
    connection.execute(
        "INSERT INTO verdicts (position, worker, envelope) VALUES (?, ?, ?)",
        (index, envelope.expect(Verdict).worker, envelope.raw),
    )


def prune(
    connection: sqlite3.Connection, log: Log, position: int, seal: Sealed, *, receipts: bool
) -> int:
    """Delete a log's entries about submissions that its seal at `position` covers, and what was
    derived from them; return how many entries.

    What stays in force is in the seal's block. `receipts`: this is the log of this peer itself,
    which keeps signed verdicts."""
    covered = seal.log(log.owner)
    start = log.start(connection)
    if covered is None or covered.first <= start:
        return 0
    rows = connection.execute(
        "SELECT entry FROM entries WHERE owner = ? AND position < ?", (log.owner, covered.first)
    )
    for entry in [decode(raw) for (raw,) in rows]:
        if isinstance(entry, Judged):
            connection.execute(
                "DELETE FROM refused WHERE worker = ? AND submission = ?",
                (entry.worker, entry.submission),
            )
        elif isinstance(entry, Consumed):
            connection.execute("DELETE FROM used WHERE submission = ?", (entry.submission,))
    for table in ("verdict_places", "evidence", "seals"):
        connection.execute(
            f"DELETE FROM {table} WHERE owner = ? AND position < ?", (log.owner, covered.first)
        )
    if receipts:
        connection.execute("DELETE FROM verdicts WHERE position < ?", (covered.first,))
    log.prune_within(connection, covered.first)
    capital.forget(connection, epochs.frontier_of(seal))
    _keep_capitals(connection, log.owner, position, seal)
    return covered.first - start


def _forget(connection: sqlite3.Connection, owner: str) -> None:
    """Delete what was derived from single entries of a log that begins anew."""
    for table in ("verdict_places", "evidence", "sealed_capitals", "seals"):
        connection.execute(f"DELETE FROM {table} WHERE owner = ?", (owner,))


def _keep_capitals(connection: sqlite3.Connection, owner: str, position: int, seal: Sealed) -> None:
    """Store the capitals that a seal's block carries, if its log begins where they end."""
    covered = seal.log(owner)
    row = connection.execute("SELECT position FROM starts WHERE owner = ?", (owner,)).fetchone()
    if covered is None or row is None or row[0] != covered.first:
        return
    connection.execute("DELETE FROM sealed_capitals WHERE owner = ?", (owner,))
    rows = connection.execute(
        "SELECT entry FROM entries WHERE owner = ? AND position >= ? AND position < ?",
        (owner, position - seal.block, position),
    )
    for worker in [decode(raw) for (raw,) in rows]:
        if isinstance(worker, SealedWorker) and worker.capitals:
            connection.execute(
                "INSERT OR REPLACE INTO sealed_capitals (worker, owner, position, capitals) "
                "VALUES (?, ?, ?, ?)",
                (worker.worker, owner, covered.first, msgspec.msgpack.encode(worker.capitals)),
            )


def deriving(owner: str, entries: Sequence[Entry], *, anew: bool = False) -> Also:
    """Return the work that updates the derived tables with new entries of `owner`'s log.

    `anew`: the log begins with them, after pruned entries that are not here."""

    def derive(connection: sqlite3.Connection, first: int) -> None:
        if anew:
            _forget(connection, owner)
        for position, entry in enumerate(entries, first):
            if isinstance(entry, Sealed):
                _add(connection, "seals", owner, position, entry.epoch, epochs.stated(entry))
                _keep_capitals(connection, owner, position, entry)
            if isinstance(entry, Carried):  # as if it were still at its own index
                deriving(owner, [decode(entry.entry)])(connection, entry.position)
            if isinstance(entry, Redeemed):
                authority = capital.stored(connection)
                invites.derive(connection, entry, authority.owners, authority.run)
            if isinstance(entry, Judged):
                capital.derive(connection, owner, position, entry)
                if binds(entry):
                    _add(connection, "refused", entry.worker, entry.submission)
                if entry.evidence.tokens:
                    raw = msgspec.msgpack.encode(entry.evidence)
                    _add(connection, "evidence", entry.worker, owner, position, raw)
            elif isinstance(entry, Consumed) and set(entry.outcomes) != {"carried"}:
                _add(connection, "used", entry.submission)
            elif isinstance(entry, (Evicted, Reinstated)):
                _add(connection, "expulsions", entry.envelope)
            if isinstance(entry, Reinstated):
                _add(connection, "reinstated", entry.peer, owner, position, entry.envelope)

    return derive


def _add(connection: sqlite3.Connection, table: str, *row: str | int | bytes) -> None:
    """Insert a row, in the order of the table's columns, unless it is there."""
    marks = ", ".join("?" * len(row))
    connection.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", row)
