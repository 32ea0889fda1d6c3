"""The use of invites according to all logs: derived tables in a trusted peer's database.

Two trusted peers may redeem one invite for two peers at once. The earlier entry counts, which all
of them find out when their logs meet; the other peer loses its lease."""

import sqlite3
from collections.abc import Sequence

from swarm.ledger.entries import Redeemed
from swarm.wire.envelope import Dropped, open_envelope
from swarm.wire.messages import Invite
from swarm.world import Database


class RedeemedInvites:
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


def is_valid(entry: Redeemed, owners: Sequence[str], run: str) -> bool:
    """Whether an entry holds the invite that it tells of, signed by one of a run's owners.

    A trusted peer may log anything, but it has only the invites that peers showed it."""
    try:
        envelope = open_envelope(entry.envelope)
    except Dropped:
        return False
    if envelope.sender not in owners or envelope.body.run != run:
        return False
    message = envelope.message
    is_named = isinstance(message, Invite) and message.id == entry.invite
    return is_named and envelope.body.issued_ms <= entry.redeemed_ms


def derive(
    connection: sqlite3.Connection, entry: Redeemed, owners: Sequence[str], run: str
) -> None:
    """Update the tables with an entry of a log, if it is valid in the run of these owners."""
    if is_valid(entry, owners, run):
        connection.execute(
            "INSERT OR IGNORE INTO redeemed (invite, redeemed_ms, peer) VALUES (?, ?, ?)",
            (entry.invite, entry.redeemed_ms, entry.peer),
        )
