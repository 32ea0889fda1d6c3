"""SQLite on a simulated disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import trio

T = TypeVar("T")


class Machine(Protocol):
    """A database's view of its disk (`SimulatedDisk`)."""

    @property
    def sync_seconds(self) -> float: ...

    def check_power(self) -> None: ...

    async def answering(self) -> None: ...


class SimulatedDatabase:
    """SQLite in memory, which the disk keeps after it is closed.

    A transaction that returned is durable. A power cut undoes a transaction that had not returned.
    """

    def __init__(self, disk: Machine, connection: sqlite3.Connection) -> None:
        self._disk = disk
        self._connection = connection
        self._writing = trio.Lock()
        self._closed = False

    def _check_open(self) -> None:
        self._disk.check_power()
        if self._closed:
            raise sqlite3.ProgrammingError("Cannot operate on a closed database.")

    def read(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        self._check_open()
        return self._connection.execute(sql, parameters).fetchall()

    async def transact(self, function: Callable[[sqlite3.Connection], T]) -> T:
        async with self._writing:
            # Shielded as on the real disk. The wait comes first, so that no reader sees an effect
            # that a power cut could still undo.
            with trio.CancelScope(shield=True):
                await self._disk.answering()
                await trio.sleep(self._disk.sync_seconds)
            self._check_open()
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                result = function(self._connection)
                self._connection.execute("COMMIT")
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            return result

    def close(self) -> None:
        self._closed = True
