"""The durable queue of cases: acknowledged submissions, those of each worker in order.

The messages of a case stay after its verdict, as long as its file does: for an audit, and for other
validators that judge it too.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from peers.validator.cases import Case
from peers.validator.docket import Docket
from peers.validator.fair import FairQueue
from peers.validator.inbox import Inbox, Key
from swarm.errors import DECODE_ERRORS
from swarm.events import Events
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.messages import StepOrder, Submission
from swarm.world import Database, execute


class CaseQueue:
    """Cases that were acknowledged and have no verdict."""

    def __init__(
        self,
        database: Database,
        docket: Docket,
        inbox: Inbox,
        events: Events,
        *,
        lanes: int,
        is_proven: Callable[[str], bool],
    ) -> None:
        """`is_proven`: whether a worker's record is long enough for the last free lane."""
        self._database = database
        self._docket = docket
        self._inbox = inbox
        self._events = events
        self._waiting: dict[Key, Case] = {}
        self._is_proven = is_proven
        self._queue: FairQueue[Case] = FairQueue(lanes)
        """Bounded by the workers' quotas of unjudged submissions."""

    def __len__(self) -> int:
        return len(self._waiting)

    def find(self, key: Key) -> Case | None:
        """The case of an acknowledged submission that has no verdict yet."""
        return self._waiting.get(key)

    def cases(self) -> list[Case]:
        return list(self._waiting.values())

    async def open(self) -> None:
        """Restore the cases acknowledged before a restart.

        Drops cases whose file is missing or whose row cannot be decoded, and judged ones of which
        the docket knows nothing.
        """

        def create(connection: sqlite3.Connection) -> None:
            for table in ("unjudged", "judged"):
                connection.execute(
                    f"CREATE TABLE IF NOT EXISTS {table} "
                    "(worker TEXT NOT NULL, digest BLOB NOT NULL, announced BLOB NOT NULL, "
                    "arranged BLOB NOT NULL, PRIMARY KEY (worker, digest))"
                )
            for key in connection.execute("SELECT worker, digest FROM judged").fetchall():
                if not self._docket.is_judged_here(key):
                    connection.execute(*_gone("judged", key))

        await self._database.transact(create)
        dropped: list[str] = []
        restored: list[Case] = []
        for worker, digest, announced, arranged in self._database.read(
            "SELECT worker, digest, announced, arranged FROM unjudged ORDER BY worker, digest"
        ):
            key = (worker, digest)
            try:
                case = _restored(announced, arranged)
            except (ValueError, Dropped, *DECODE_ERRORS) as error:
                dropped.append(str(error))
                await self.remove(key)
                continue
            if not self._inbox.exists(key):
                await self.remove(key)
            elif self._docket.is_judged_here(key):
                await self.settle(case)
            else:
                restored.append(case)
                self._docket.orders.take(case.ordered)
        for case in sorted(restored, key=lambda case: case.slot):
            self._admit(case)
            self.put(case)
        if dropped:
            self._events.emit("validator.cases_dropped", cases=len(dropped), reason=dropped[0])

    async def add(self, case: Case) -> None:
        """Store a case durably, so that its worker can rely on a verdict."""
        self._admit(case)
        await execute(self._database, _kept("unjudged", case))
        self.put(case)

    def put(self, case: Case) -> None:
        """Queue a case; one that another validator has judged is drawn again after a restart."""
        is_proven = case.first is not None or self._is_proven(case.worker)
        self._queue.put(case.client, case, is_proven=is_proven)

    def _admit(self, case: Case) -> None:
        self._waiting[case.key] = case
        self._docket.fill(case.slot, case.submission.digest)
        self._inbox.hold(case.key, case.submission.size_bytes)

    async def remove(self, key: Key) -> None:
        """Remove a settled case; does nothing if it does not exist."""
        self._waiting.pop(key, None)
        await execute(self._database, _gone("unjudged", key))

    async def settle(self, case: Case) -> None:
        """Take a judged case from the queue, and keep its messages until `forget`."""
        self._waiting.pop(case.key, None)
        await execute(self._database, _kept("judged", case), _gone("unjudged", case.key))

    def judged(self, key: Key) -> Case | None:
        """A case that was judged here and whose file is still served."""
        rows = self._database.read(
            "SELECT announced, arranged FROM judged WHERE worker = ? AND digest = ? ORDER BY 1", key
        )
        try:
            return _restored(*rows[0]) if rows else None
        except (ValueError, Dropped, *DECODE_ERRORS):
            return None

    async def forget(self, key: Key) -> None:
        """Forget the messages of a judged case."""
        await execute(self._database, _gone("judged", key))

    async def next(self, lane: int = 0) -> Case:
        """Wait for the next case for a lane; `done` must follow."""
        return await self._queue.next(lane)

    def done(self, case: Case, seconds: float) -> None:
        """Charge a case's worker for the seconds that the case took."""
        self._queue.done(case.client, seconds)

    def doubt(self, case: Case, *, doubted: bool) -> bool:
        """Note whether a case in a lane is most probably a fake; returns whether it must wait until
        no other needs the lane. Another validator is not blamed for a case that it judged."""
        return case.first is None and self._queue.doubt(case.client, case, doubted=doubted)

    def settled_elsewhere(self, case: Case) -> Envelope | None:
        """Another validator's verdict that makes one of this validator superfluous."""
        return self._docket.settled_elsewhere(case.key) if case.first is None else None


def _kept(table: str, case: Case) -> tuple[str, Sequence[Any]]:
    """The statement that writes a case."""
    columns = "(worker, digest, announced, arranged)"
    sql = f"INSERT OR REPLACE INTO {table} {columns} VALUES (?, ?, ?, ?)"
    return sql, (*case.key, case.announced.raw, case.ordered.raw)


def _gone(table: str, key: Key) -> tuple[str, Sequence[Any]]:
    """The statement that deletes a case."""
    return f"DELETE FROM {table} WHERE worker = ? AND digest = ?", key


def _restored(announced: bytes, arranged: bytes) -> Case:
    """Decode the case in a row.

    Raises `Dropped`, `ValueError` or `DECODE_ERRORS` for a row of an incompatible version of Swarm.
    """
    case = Case(open_envelope(announced), open_envelope(arranged))
    found = (case.announced.message, case.ordered.message)
    if not (isinstance(found[0], Submission) and isinstance(found[1], StepOrder)):
        raise ValueError(f"a {type(found[0]).__name__} and a {type(found[1]).__name__}")
    return case
