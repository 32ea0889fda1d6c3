"""The durable queue of cases, each worker's in order, shared fairly. A case's messages stay as long
as its file does: for an audit, and for other validators."""

import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import trio

from peers.validator.cases import Case
from peers.validator.docket import Docket
from peers.validator.inbox import Inbox, Key
from swarm.errors import DECODE_ERRORS
from swarm.events import Events
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.messages import StepOrder, Submission
from swarm.world import Database, execute

Item = TypeVar("Item")

SLOW_FACTOR = 4.0
"""A client is slow if its last item took longer than this many times the usual, and ..."""
SLOW_SECONDS = 5.0
"""... longer than this. Slow, unproven and doubted clients together never occupy the last lane."""

USUAL_SHARE = 0.1
"""Weight of the newest item in the usual duration."""

CLIENTS_MAX = 10_000
"""Clients whose used seconds are remembered; of more, those that used least are forgotten."""


class FairQueue(Generic[Item]):
    """Each client's items come in order, one at a time: next that of the client with the fewest
    seconds used, a doubted one's last. Who was away, or is new, starts at the least of those
    present, or at what it used if that is more: it can neither save up nor begin anew."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._items: dict[str, deque[Item]] = {}
        """By client; only clients with items."""
        self._used: dict[str, float] = {}
        """Seconds used, by client."""
        self._busy: set[str] = set()
        """Clients with an item in a lane."""
        self._slow: set[str] = set()
        self._unproven: set[str] = set()
        """Clients without a record: identities cost nothing to make."""
        self._doubted: set[str] = set()
        """Clients whose last item was most probably a fake."""
        self._usual = 0.0
        """Usual duration of an item, seconds."""
        self._idle: dict[int, trio.Event] = {}
        """Lanes that wait for an item."""

    def put(self, client: str, item: Item, *, is_proven: bool = True) -> None:
        """Add an item. `is_proven`: whether its client has a record."""
        (self._unproven.discard if is_proven else self._unproven.add)(client)
        if client not in self._items:
            self._items[client] = deque()
            if client not in self._busy:
                present = {*self._items, *self._busy} - {client}
                least = min((self._used[each] for each in present), default=0.0)
                self._used[client] = max(self._used.get(client, 0.0), least)
        self._items[client].append(item)
        self._wake()

    async def next(self, lane: int = 0) -> Item:
        """Wait for an item; `done` must follow. Among idle lanes the first gets it."""
        while True:
            if not any(other < lane for other in self._idle):
                client = self._choose()
                if client is not None:
                    return self._take(client)
            event = self._idle[lane] = trio.Event()
            try:
                await event.wait()
            finally:
                self._idle.pop(lane, None)

    def done(self, client: str, seconds: float) -> None:
        """Charge a client for its item; it may have another one for the first idle lane."""
        self._busy.discard(client)
        self._used[client] += seconds
        if seconds > max(SLOW_SECONDS, SLOW_FACTOR * self._usual):
            self._slow.add(client)
        else:
            self._slow.discard(client)
            self._usual += USUAL_SHARE * (seconds - self._usual)
        self._forget()
        self._wake()

    def doubt(self, client: str, item: Item, *, doubted: bool) -> bool:
        """Note whether a client's item in a lane is most probably a fake. True: the lane must put
        it down; it comes again, before the client's others, once no other client needs the lane."""
        if not doubted:
            self._doubted.discard(client)
        if not doubted or client in self._doubted:
            return False
        self._doubted.add(client)
        self._items.setdefault(client, deque()).appendleft(item)
        return True

    def _choose(self) -> str | None:
        """The client whose turn it is; None if none may use a lane now."""
        # One lane stays for clients with a record whose items are quick, however many identities
        # the others have. A single lane has to serve all.
        risky = self._slow | self._unproven | self._doubted
        risky_may = len(self._busy & risky) < max(1, self._lanes - 1)
        ready = [
            client
            for client in self._items
            if client not in self._busy and (risky_may or client not in risky)
        ]
        doubted_may = len(self._busy & self._doubted) < max(1, self._lanes - 2)
        if not doubted_may:  # they leave one to those that are only new
            ready = [client for client in ready if client not in self._doubted]
        return min(ready, key=lambda each: (each in self._doubted, self._used[each]), default=None)

    def _take(self, client: str) -> Item:
        items = self._items[client]
        item = items.popleft()
        if not items:
            del self._items[client]
        self._busy.add(client)
        self._wake()
        return item

    def _wake(self) -> None:
        if self._idle:
            self._idle[min(self._idle)].set()

    def _forget(self) -> None:
        if len(self._used) > CLIENTS_MAX:
            away = self._used.keys() - self._items.keys() - self._busy
            for client in sorted(away, key=lambda each: (self._used[each], each))[: len(away) // 2]:
                del self._used[client]
                self._slow.discard(client)
                self._unproven.discard(client)
                self._doubted.discard(client)


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
        """Restore acknowledged cases that are whole, decodable and, if judged, in the docket."""

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
    columns = "(worker, digest, announced, arranged)"
    sql = f"INSERT OR REPLACE INTO {table} {columns} VALUES (?, ?, ?, ?)"
    return sql, (*case.key, case.announced.raw, case.ordered.raw)


def _gone(table: str, key: Key) -> tuple[str, Sequence[Any]]:
    return f"DELETE FROM {table} WHERE worker = ? AND digest = ?", key


def _restored(announced: bytes, arranged: bytes) -> Case:
    """A row's case; raises `Dropped`, `ValueError` or `DECODE_ERRORS` for another version's."""
    case = Case(open_envelope(announced), open_envelope(arranged))
    found = (case.announced.message, case.ordered.message)
    if not (isinstance(found[0], Submission) and isinstance(found[1], StepOrder)):
        raise ValueError(f"a {type(found[0]).__name__} and a {type(found[1]).__name__}")
    return case
