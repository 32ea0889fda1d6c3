"""The use of invites according to all logs: derived tables in a trusted peer's database.

Two trusted peers may redeem one invite for two peers at once. The earlier entry counts, which all
of them find out when their logs meet; the other peer loses its lease.
"""

from __future__ import annotations

import sqlite3

from swarm.ledger.entries import Entry, InviteRevoked, Redeemed
from swarm.world import Database

TABLES = (
    "redeemed (invite BLOB, redeemed_ms INTEGER, peer TEXT, PRIMARY KEY (invite, redeemed_ms, "
    "peer)) WITHOUT ROWID",
    "revoked (invite BLOB PRIMARY KEY) WITHOUT ROWID",
)


class RedeemedInvites:
    """Reads the tables of invites."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def holder(self, invite: bytes) -> str | None:
        """Return the peer that redeemed an invite first."""
        rows = self._database.read(
            "SELECT peer FROM redeemed WHERE invite = ? ORDER BY redeemed_ms, peer LIMIT 1",
            (invite,),
        )
        return rows[0][0] if rows else None

    def invites_of(self, peer: str) -> list[bytes]:
        """Return the invites that a peer redeemed, first or not."""
        rows = self._database.read(
            "SELECT invite FROM redeemed WHERE peer = ? ORDER BY invite", (peer,)
        )
        return [invite for (invite,) in rows]

    def is_revoked(self, invite: bytes) -> bool:
        """Whether the owner revoked an invite."""
        return bool(
            self._database.read("SELECT 1 FROM revoked WHERE invite = ? ORDER BY 1", (invite,))
        )


def derive(connection: sqlite3.Connection, entry: Entry) -> None:
    """Update the tables with an entry of a log."""
    if isinstance(entry, Redeemed):
        connection.execute(
            "INSERT OR IGNORE INTO redeemed (invite, redeemed_ms, peer) VALUES (?, ?, ?)",
            (entry.invite, entry.redeemed_ms, entry.peer),
        )
    elif isinstance(entry, InviteRevoked):
        connection.execute("INSERT OR IGNORE INTO revoked (invite) VALUES (?)", (entry.invite,))
