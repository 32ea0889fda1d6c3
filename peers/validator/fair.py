"""A queue that shares several lanes fairly among clients, by the seconds that each has used."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import trio

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
    """Items of clients. Each client's items come in order, and one at a time.

    The next item is that of the client that has used the fewest seconds; a doubted client's only if
    no other may have the lane. A client that was away, or is new, starts at the least of those
    present, or at what it has used if that is more: it can neither save up nor begin anew.
    """

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
        """Note whether a client's item in a lane is most probably a fake.

        Returns whether the lane must put it down: of a client that was not doubted before, it comes
        again, before its others, once no other client needs the lane.
        """
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
