"""Requests from outside, which share an engine with the episodes of a `Player`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from peers.engines.engine import Engine, Piece, Request

FIRST_ID = 1 << 40
"""Ids of these requests begin here, so that they are none of a player's."""

Found = tuple[int, Piece | ValueError]
"""(id, what became of the request)."""


def _nothing() -> None:
    pass


class Guests:
    """Any thread puts requests and takes their pieces; the engine's thread does the rest."""

    def __init__(self, news: Callable[[], None] = _nothing) -> None:
        """`news` is called in the engine's thread when there is something to take."""
        self._ids = count(FIRST_ID)
        self._inbox: deque[Request | int] = deque()
        """Requests to submit, and ids to cancel, in order."""
        self._live: dict[int, Request] = {}
        """Requests that the engine holds."""
        self._found: deque[Found] = deque()
        self.news = news
        self.wake: Callable[[], None] = _nothing
        """Called when something was put, by the thread that puts it."""

    def next_id(self) -> int:
        """An id that no request has yet."""
        return next(self._ids)

    def put(self, item: Request | int) -> None:
        """Submit a request, or cancel the one of that id and drop the cache that it kept."""
        self._inbox.append(item)
        self.wake()

    def taken(self) -> list[Found]:
        """The pieces and refusals since the last call."""
        return [self._found.popleft() for _ in range(len(self._found))]

    @property
    def wait(self) -> bool:
        """Whether the engine has something to do for them."""
        return bool(self._inbox or self._live)

    # --- in the engine's thread ---------------------------------------------------------------

    @property
    def are_live(self) -> bool:
        return bool(self._live)

    def submit(self, engine: Engine) -> None:
        """Submit and cancel what was put."""
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, int):
                engine.cancel(item)
                self._live.pop(item, None)
                continue
            try:
                engine.submit(item)
                self._live[item.id] = item
            except ValueError as error:
                self._add((item.id, error))

    def take(self, piece: Piece) -> bool:
        """Take a finished piece if it is theirs."""
        if piece.id < FIRST_ID:
            return False
        if self._live.pop(piece.id, None) is not None:
            self._add((piece.id, piece))
        return True

    def advance(
        self, engine: Engine, seconds: float, take: Callable[[Piece], object] | None = None
    ) -> None:
        """Step until a request is finished or refused, none is left, or time is over.

        `take` gets every piece; by default only theirs are expected.
        """
        until = time.perf_counter() + seconds
        while True:
            self.submit(engine)
            if self._found or not self._live or time.perf_counter() > until:
                return
            for piece in engine.step():
                (take or self.take)(piece)

    def withdraw(self, engine: Engine) -> None:
        """Cancel all requests before other weights are loaded, to be submitted again after it.

        A piece has then tokens of one policy only. Tokens so far are sampled again.
        """
        for id, request in reversed(self._live.items()):
            engine.cancel(id)
            self._inbox.appendleft(replace(request, continues=None))
        self._live.clear()

    def _add(self, found: Found) -> None:
        self._found.append(found)
        self.news()
