"""Durable state of a trainer's network process, in SQLite: `outer.sqlite`."""

from typing import NamedTuple, TypeVar

import msgspec

from swarm.data import statements
from swarm.errors import DECODE_ERRORS, UserError
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.outer import Contribution, RoundRecord
from swarm.world import Database, execute

T = TypeVar("T")

_TABLES = statements(__file__)

OWN_KEPT = 100
"""Own contributions remembered, so that no restart makes a second one from the same base."""


class OuterState(NamedTuple):
    """An outer state on this disk."""

    record: bytes
    """The record that it follows."""
    round: int
    digest: bytes


class Own(NamedTuple):
    """One of this trainer's contributions."""

    number: int
    """Consecutive from 1; also names the inner state after it."""
    contribution: Contribution


class OuterStore:
    """Stores records, positions of outer states, and own contributions.

    Every write is durable on return."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def open(self) -> None:
        """Create the tables that are missing."""
        await execute(self._database, *_TABLES)

    async def keep_record(self, envelope: Envelope) -> None:
        row = (envelope.expect(RoundRecord).round, envelope.digest, envelope.raw)
        sql = "INSERT OR IGNORE INTO records (round, digest, envelope) VALUES (?, ?, ?)"
        await execute(self._database, (sql, row))

    def records(self, since: int = 0) -> list[Envelope]:
        """The records of round `since` and later, by round."""
        rows = self._database.read(
            "SELECT envelope FROM records WHERE round >= ? ORDER BY round, digest", (since,)
        )
        try:
            found = [open_envelope(raw) for (raw,) in rows]
        except Dropped as dropped:
            raise _other_version(dropped) from dropped
        if not all(
            each.signature for one in found for each in one.expect(RoundRecord).contributions
        ):
            raise _other_version(ValueError("contributions were not signed"))
        return found

    async def reach(self, state: OuterState) -> None:
        """Note a state that is durable, as the newest one."""
        await execute(
            self._database,
            ("INSERT OR REPLACE INTO states (record, round, digest) VALUES (?, ?, ?)", state),
            ("INSERT OR REPLACE INTO position (id, record) VALUES (1, ?)", (state.record,)),
        )

    def states(self) -> list[OuterState]:
        """The states that were reached, by round."""
        return [
            OuterState(*row)
            for row in self._database.read(
                "SELECT record, round, digest FROM states ORDER BY round, record"
            )
        ]

    def position(self) -> bytes | None:
        """The record whose state was reached last."""
        rows = self._database.read("SELECT record FROM position ORDER BY id")
        return rows[0][0] if rows else None

    async def drop_states_before(self, round: int) -> None:
        await execute(self._database, ("DELETE FROM states WHERE round < ?", (round,)))

    async def keep_own(self, own: Own) -> None:
        row = (own.number, own.contribution.base, msgspec.msgpack.encode(own.contribution))
        await execute(
            self._database,
            ("INSERT INTO own (number, base, contribution) VALUES (?, ?, ?)", row),
            ("DELETE FROM own WHERE number <= ?", (own.number - OWN_KEPT,)),
        )

    def own(self) -> list[Own]:
        """The newest own contributions, in order."""
        rows = self._database.read("SELECT number, contribution FROM own ORDER BY number")
        return [Own(number, _decode(raw, Contribution)) for number, raw in rows]


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except DECODE_ERRORS as error:
        raise _other_version(error) from error


def _other_version(error: Exception) -> UserError:
    return UserError(
        f"outer.sqlite in this home was written by another version of Swarm ({error}); "
        "continue the run with that version, or begin with another --home"
    )
