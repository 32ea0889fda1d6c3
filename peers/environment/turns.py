"""The turns that an environment peer has signed, on its disk.

A repeated request gets the same turn, also after a restart. Otherwise a worker could ask an
environment that is not deterministic again, until it likes the answer.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from typing import NamedTuple

import trio

from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.turns import Turn
from swarm.world import Disk, execute

_COLUMNS = "seed, grp, sample, idx, before"

WORKER_SHARE = 1 / 8
"""Part of the space that the turns of one worker may take, and ..."""
NETWORK_SHARE = 1 / 2
"""... those of all workers of one network (/24, IPv6: /48)."""


class Asker(NamedTuple):
    """Whose space a turn takes."""

    worker: str
    network: str


_Key = tuple[bytes, int, int, int, bytes]


def _key(turn: Turn) -> _Key:
    """What a turn answers."""
    return (turn.seed, turn.group, turn.sample, turn.index, turn.before)


class SignedTurns:
    """Turns by what they answer, for as long as their step can be trained on."""

    def __init__(self, disk: Disk, bytes_max: int) -> None:
        self._database = disk.database("turns.sqlite")
        self._bytes_max = bytes_max
        self._turn = trio.Lock()
        self._unstored: dict[_Key, tuple[int, int, bytes, str, str]] = {}
        self._used: Counter[tuple[str, str]] = Counter()
        """Bytes in all (`""`), and of each worker and network."""

    async def open(self) -> None:
        """Create the table."""
        table = (
            "CREATE TABLE IF NOT EXISTS turns (seed BLOB NOT NULL, grp INTEGER NOT NULL,"
            " sample INTEGER NOT NULL, idx INTEGER NOT NULL, before BLOB NOT NULL,"
            " lineage INTEGER NOT NULL, step INTEGER NOT NULL, envelope BLOB NOT NULL,"
            " worker TEXT NOT NULL, network TEXT NOT NULL,"
            f" PRIMARY KEY ({_COLUMNS})) WITHOUT ROWID"
        )
        index = "CREATE INDEX IF NOT EXISTS by_step ON turns (lineage, step)"
        await execute(self._database, table, index)
        self._count()

    def has_room(self, asker: Asker) -> bool:
        """Whether another turn may be kept."""
        return (
            self._used["", ""] < self._bytes_max
            and self._used["worker", asker.worker] < WORKER_SHARE * self._bytes_max
            and self._used["network", asker.network] < NETWORK_SHARE * self._bytes_max
        )

    def _charge(self, asker: Asker, size_bytes: int) -> None:
        for key in (("", ""), ("worker", asker.worker), ("network", asker.network)):
            self._used[key] += size_bytes

    def _count(self) -> None:
        self._used.clear()
        for worker, network, size_bytes in self._database.read(
            "SELECT worker, network, SUM(LENGTH(envelope)) FROM turns GROUP BY worker, network"
            " ORDER BY worker, network"
        ):
            self._charge(Asker(worker, network), size_bytes)

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
        self, signed: Envelope, at: tuple[int, int], oldest: tuple[int, int], asker: Asker
    ) -> Envelope:
        """Store a turn unless one was stored meanwhile; returns the one that counts, once it is
        durable.

        `at`: lineage and step of its submission; turns of those before `oldest` are deleted.
        """
        turn = signed.expect(Turn)
        key = _key(turn)
        if key not in self._unstored:
            self._unstored[key] = (*at, signed.raw, *asker)
            self._charge(asker, len(signed.raw))
        async with self._turn:
            rows = dict(self._unstored)
            if key in rows:  # else the task before has stored it together with its own

                def store(connection: sqlite3.Connection) -> int:
                    connection.executemany(
                        f"INSERT OR IGNORE INTO turns ({_COLUMNS}, lineage, step, envelope, worker,"
                        " network) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        [(*each, *values) for each, values in rows.items()],
                    )
                    return connection.execute(
                        "DELETE FROM turns WHERE (lineage, step) < (?, ?)", oldest
                    ).rowcount

                deleted = await self._database.transact(store)
                for each in rows:  # only now: if storing failed, the next task stores them
                    del self._unstored[each]
                if deleted:
                    self._count()
                    for *_, raw, worker, network in self._unstored.values():
                        self._charge(Asker(worker, network), len(raw))
        return self.find(turn) or signed
