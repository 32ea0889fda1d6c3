"""A mirror of another trusted peer's log; every entry is verified by a head its owner signed."""

import sqlite3
from collections.abc import Sequence

from swarm.data import statements
from swarm.errors import PeerError, SwarmError
from swarm.ledger import merkle
from swarm.ledger.log import Also, Log
from swarm.ledger.wire import ForkEvidence, Origin
from swarm.wire.envelope import Envelope, open_envelope
from swarm.wire.messages import LogHead
from swarm.world import Database, execute

FORKS_MAX = 4
"""Contradictions kept of each log. One is enough as evidence; a peer may sign thousands."""


class Fork(SwarmError):
    """A trusted peer signed a contradictory head; `evidence` has both heads, if both are here."""

    def __init__(self, reason: str, evidence: ForkEvidence | None = None) -> None:
        super().__init__(reason)
        self.evidence = evidence


class WrongOrigin(PeerError):
    """A pruned log was offered that does not lead to the head that its owner signed."""


class LogMirror:
    """The copy of `owner`'s log, and the signed head that it is checked against.

    A newer head replaces that head only once the mirror holds all the old head's entries, so that
    every head received is checked."""

    def __init__(self, database: Database, owner: str) -> None:
        self._database = database
        self.log = Log(database, owner)

    @staticmethod
    async def create_tables(database: Database) -> None:
        """Create the tables if they do not exist; call it before any other use of the database."""
        await execute(database, *statements(__file__))

    def head(self) -> Envelope | None:
        """The stored head if the mirror holds all its entries, else None."""
        rows = self._database.read(_HEAD, (self.log.owner,))
        head = open_envelope(rows[0][0]) if rows else None
        return head if head is not None and head.expect(LogHead).size <= self.log.size() else None

    async def extend(
        self,
        head: Envelope,
        entries: Sequence[bytes],
        proof: Sequence[bytes] = (),
        also: Also | None = None,
        origin: Origin | None = None,
    ) -> None:
        """Append `entries` if the signed `head` covers them and all entries held so far.

        `proof` is the consistency proof from the size after `entries` to the head's size, empty if
        they are equal. The append is durable on return, in one transaction with `also`; an error
        changes nothing. A head older than the stored one is ignored. Raises `Fork` when the head
        contradicts the entries held.

        With an `origin` the copy begins there anew: whoever offers the log has pruned entries that
        this copy lacks. Nothing is held that the head could contradict: `WrongOrigin` is raised."""
        if not isinstance(head.message, LogHead) or head.sender != self.log.owner:
            raise ValueError(f"not a head of the log of {self.log.owner}")
        target = head.message

        def run(connection: sqlite3.Connection) -> None:
            held = self.log.size(connection) if origin is None else 0
            row = connection.execute(_HEAD, (self.log.owner,)).fetchone()
            known = open_envelope(row[0]) if row is not None else None
            if known is not None:
                if known.body.sequence > head.body.sequence:
                    return
                held = max(held, known.expect(LogHead).size)
            evidence = ForkEvidence(known.raw, head.raw) if known is not None else None
            if target.size < held:
                raise Fork(
                    f"the log of {self.log.owner} shrank from {held} to {target.size} entries",
                    evidence,
                )
            if origin is not None:
                self.log.begin_within(connection, origin.start, origin.hashes)
            self.log.append_within(connection, entries, also)
            size = self.log.size(connection)
            own = self.log.root(size, connection)
            if not merkle.verify_consistency(size, target.size, own, target.root, proof):
                if origin is not None:
                    raise WrongOrigin(
                        f"the log of {self.log.owner} from entry {origin.start} on does not lead "
                        f"to its signed head of {target.size} entries"
                    )
                raise Fork(
                    f"the log of {self.log.owner} forked: its head of {target.size} entries "
                    f"does not follow from the {size} held here",
                    evidence,
                )
            if known is not None:
                before = known.expect(LogHead)
                if before.size > size:
                    return  # keep the stored head until all its entries can be checked
                known_here = before.size >= self.log.start(connection)
                if known_here and self.log.root(before.size, connection) != before.root:
                    raise Fork(
                        f"the log of {self.log.owner} forked: it signed another head of "
                        f"{before.size} entries before",
                        evidence,
                    )
            connection.execute(
                "INSERT INTO heads (owner, envelope) VALUES (?, ?) "
                "ON CONFLICT (owner) DO UPDATE SET envelope = excluded.envelope",
                (self.log.owner, head.raw),
            )

        await self._database.transact(run)

    async def keep(self, evidence: ForkEvidence) -> None:
        """Keep the evidence of a fork durably, unless `FORKS_MAX` of this log are kept already."""
        owner = self.log.owner
        sql = (
            "INSERT OR IGNORE INTO forks (owner, first, second) SELECT ?, ?, ? "
            "WHERE (SELECT COUNT(*) FROM forks WHERE owner = ?) < ?"
        )
        row = (owner, evidence.first, evidence.second, owner, FORKS_MAX)
        await execute(self._database, (sql, row))


def forks_in(database: Database) -> list[ForkEvidence]:
    """The kept evidence of forks of all logs."""
    rows = database.read("SELECT first, second FROM forks ORDER BY owner, first, second")
    return [ForkEvidence(bytes(first), bytes(second)) for first, second in rows]


_HEAD = "SELECT envelope FROM heads WHERE owner = ? ORDER BY owner"
