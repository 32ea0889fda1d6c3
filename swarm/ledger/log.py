"""One trusted peer's append-only log in SQLite: entries, and the complete nodes of their tree.

The oldest entries may be pruned. The largest complete subtrees before the first one left then stand
for them: roots of all larger sizes, and proofs between them, need no others."""

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from swarm.ledger import merkle
from swarm.ledger.entries import Entry, encode
from swarm.world import Database, execute


class Pruned(ValueError):
    """Entries that are no longer in this log were asked for."""


Also = Callable[[sqlite3.Connection, int], None]
"""Additional work in the transaction of an append; gets the index of the first new entry."""


class Log:
    """The log of `owner` in `database`, which may hold several logs. Keeps nothing in memory."""

    def __init__(self, database: Database, owner: str) -> None:
        self._database = database
        self.owner = owner

    async def append(self, entries: Sequence[Entry], also: Also | None = None) -> range:
        """Append entries durably, in one transaction with `also`; returns their indices."""
        raws = [encode(entry) for entry in entries]
        return await self._database.transact(
            lambda connection: self.append_within(connection, raws, also)
        )

    def append_within(
        self, connection: sqlite3.Connection, raws: Sequence[bytes], also: Also | None = None
    ) -> range:
        """Append encoded entries inside the caller's transaction; returns their indices."""

        node = partial(self._node, connection)
        first = size = self.size(connection)
        for raw in raws:
            connection.execute(
                "INSERT INTO entries (owner, position, entry) VALUES (?, ?, ?)",
                (self.owner, size, raw),
            )
            for level, position, value in merkle.completed_by(size, merkle.leaf_hash(raw), node):
                connection.execute(
                    "INSERT INTO nodes (owner, level, position, hash) VALUES (?, ?, ?, ?)",
                    (self.owner, level, position, value),
                )
            size += 1
        if also is not None:
            also(connection, first)
        return range(first, size)

    def prune_within(self, connection: sqlite3.Connection, start: int) -> None:
        """Delete the entries before `start`, inside the caller's transaction."""
        connection.execute(
            "DELETE FROM entries WHERE owner = ? AND position < ?", (self.owner, start)
        )
        peaks = set(merkle.peaks_of(start))
        for level in range(start.bit_length()):
            last = start >> level  # the first subtree of this level that is not wholly before
            if (level, last - 1) in peaks:
                last -= 1
            connection.execute(
                "DELETE FROM nodes WHERE owner = ? AND level = ? AND position < ?",
                (self.owner, level, last),
            )
        self._set_start(connection, start)

    def begin_within(
        self, connection: sqlite3.Connection, start: int, peaks: Sequence[bytes]
    ) -> None:
        """Forget this log and begin at `start`; `peaks` stand for the entries before it.

        Raises `ValueError` unless there are as many as `start` needs."""
        places = merkle.peaks_of(start)
        if len(peaks) != len(places):
            raise ValueError(f"{len(peaks)} hashes for a log that begins at {start}")
        for table in ("entries", "nodes"):
            connection.execute(f"DELETE FROM {table} WHERE owner = ?", (self.owner,))
        connection.executemany(
            "INSERT INTO nodes (owner, level, position, hash) VALUES (?, ?, ?, ?)",
            [(self.owner, *place, peak) for place, peak in zip(places, peaks, strict=True)],
        )
        self._set_start(connection, start)

    async def begin(self) -> None:
        """Note durably that this log exists, also while it has no entries."""
        sql = "INSERT OR IGNORE INTO starts (owner, position) VALUES (?, 0)"
        await execute(self._database, (sql, (self.owner,)))

    def _set_start(self, connection: sqlite3.Connection, start: int) -> None:
        connection.execute(
            "INSERT INTO starts (owner, position) VALUES (?, ?) "
            "ON CONFLICT (owner) DO UPDATE SET position = excluded.position",
            (self.owner, start),
        )

    # --- reading: inside a transaction if `connection` is given --------------------------------

    def size(self, connection: sqlite3.Connection | None = None) -> int:
        """Number of entries in the log."""
        return int(self._rows(connection, _SIZE, self.owner, self.owner)[0][0])

    def start(self, connection: sqlite3.Connection | None = None) -> int:
        """Index of the first entry that is not pruned."""
        rows = self._rows(connection, _START, self.owner)
        return int(rows[0][0]) if rows else 0

    def has_begun(self) -> bool:
        """Whether this database ever held this log, if only without entries."""
        return self.size() > 0 or bool(self._database.read(_START, (self.owner,)))

    def peaks(self) -> list[bytes]:
        """The hashes that stand for the pruned entries, from left to right."""
        return [self._node(None, *place) for place in merkle.peaks_of(self.start())]

    def root(self, size: int, connection: sqlite3.Connection | None = None) -> bytes:
        """Root of the first `size` entries."""
        return merkle.root(size, partial(self._node, connection))

    def head(self) -> tuple[int, bytes]:
        """Size and root of the whole log."""
        size = self.size()
        return size, self.root(size)

    def entries(self, start: int, count: int) -> list[bytes]:
        """Up to `count` encoded entries from `start` on. Raises `Pruned` if the first is pruned."""
        self._check_kept(start)
        rows = self._database.read(
            "SELECT entry FROM entries WHERE owner = ? AND position >= ? AND position < ? "
            "ORDER BY position",
            (self.owner, start, start + count),
        )
        return [bytes(row[0]) for row in rows]

    def entry_sizes(self, start: int, count: int) -> list[int]:
        """Bytes of each entry that `entries` would return."""
        self._check_kept(start)
        rows = self._database.read(
            "SELECT LENGTH(entry) FROM entries WHERE owner = ? AND position >= ? "
            "AND position < ? ORDER BY position",
            (self.owner, start, start + count),
        )
        return [int(row[0]) for row in rows]

    def inclusion(self, index: int, size: int) -> list[bytes]:
        """Proof that entry `index` is among the first `size`; raises `ValueError`."""
        self._check(size)
        self._check_kept(index)
        return merkle.inclusion_proof(index, size, partial(self._node, None))

    def consistency(self, old: int, new: int) -> list[bytes]:
        """Proof that the first `new` entries begin with the first `old`; raises `ValueError`."""
        self._check(new)
        self._check_kept(old or new)  # the proof from nothing is empty
        return merkle.consistency_proof(old, new, partial(self._node, None))

    def _check(self, size: int) -> None:
        held = self.size()
        if size > held:
            raise ValueError(f"this log has {held} entries, not {size}")

    def _check_kept(self, index: int) -> None:
        start = self.start()
        if index < start:
            raise Pruned(
                f"entries of this log before {start} are sealed and pruned; a worker proves its "
                "earlier work by the proofs that it keeps (swarm ledger prove --from its home)"
            )

    def _node(self, connection: sqlite3.Connection | None, level: int, position: int) -> bytes:
        return bytes(self._rows(connection, _NODE, self.owner, level, position)[0][0])

    def _rows(self, connection: sqlite3.Connection | None, sql: str, *values: str | int) -> Any:
        if connection is None:
            return self._database.read(sql, values)
        return connection.execute(sql, values).fetchall()


_SIZE = (
    "SELECT COALESCE(MAX(position) + 1, (SELECT position FROM starts WHERE owner = ?), 0) "
    "FROM entries WHERE owner = ? ORDER BY 1"
)
_START = "SELECT position FROM starts WHERE owner = ? ORDER BY 1"
_NODE = "SELECT hash FROM nodes WHERE owner = ? AND level = ? AND position = ? ORDER BY hash"
