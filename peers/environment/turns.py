"""The turns that an environment peer has signed, on its disk.

A repeated request gets the same turn, also after a restart. Otherwise a worker could ask an
environment that is not deterministic again, until it likes the answer.
"""

from __future__ import annotations

import sqlite3

import trio

from swarm.envelope import Dropped, Envelope, open_envelope
from swarm.turns import Turn
from swarm.world import Disk

_COLUMNS = "seed, grp, sample, idx, before"


_Key = tuple[bytes, int, int, int, bytes]


def _key(turn: Turn) -> _Key:
    """What a turn answers."""
    return (turn.seed, turn.group, turn.sample, turn.index, turn.before)


class SignedTurns:
    """Turns by what they answer, for as long as their step can be trained on."""

    def __init__(self, disk: Disk) -> None:
        self._database = disk.database("turns.sqlite")
        self._turn = trio.Lock()
        self._unstored: dict[_Key, tuple[int, int, bytes]] = {}

    async def open(self) -> None:
        """Create the table."""

        def create(connection: sqlite3.Connection) -> None:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS turns (seed BLOB NOT NULL, grp INTEGER NOT NULL,"
                " sample INTEGER NOT NULL, idx INTEGER NOT NULL, before BLOB NOT NULL,"
                " lineage INTEGER NOT NULL, step INTEGER NOT NULL, envelope BLOB NOT NULL,"
                f" PRIMARY KEY ({_COLUMNS})) WITHOUT ROWID"
            )
            connection.execute("CREATE INDEX IF NOT EXISTS by_step ON turns (lineage, step)")

        await self._database.transact(create)

    def close(self) -> None:
        self._database.close()

    def find(self, turn: Turn) -> Envelope | None:
        """The turn that was signed before in the place of `turn`."""
        found = self._database.read(
            f"SELECT envelope FROM turns WHERE ({_COLUMNS}) = (?, ?, ?, ?, ?) ORDER BY {_COLUMNS}",
            _key(turn),
        )
        try:
            return open_envelope(found[0][0]) if found else None
        except Dropped:  # another version of Swarm wrote it
            return None

    async def keep(
        self, signed: Envelope, at: tuple[int, int], oldest: tuple[int, int]
    ) -> Envelope:
        """Store a turn unless one was stored meanwhile; returns the one that counts, once it is
        durable.

        `at`: lineage and step of its submission; turns of those before `oldest` are deleted.
        """
        turn = signed.expect(Turn)
        key = _key(turn)
        self._unstored.setdefault(key, (*at, signed.raw))
        async with self._turn:
            rows = dict(self._unstored)
            if key in rows:  # else the task before has stored it together with its own

                def store(connection: sqlite3.Connection) -> None:
                    connection.executemany(
                        "INSERT OR IGNORE INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                        [(*each, *values) for each, values in rows.items()],
                    )
                    connection.execute("DELETE FROM turns WHERE (lineage, step) < (?, ?)", oldest)

                await self._database.transact(store)
                for each in rows:  # only now: if storing failed, the next task stores them
                    del self._unstored[each]
        return self.find(turn) or signed
