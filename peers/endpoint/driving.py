"""Steps an engine for many requests at once, in a thread beside the HTTP server."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count

import trio

from peers.engines.engine import Engine, Piece, Request
from swarm.errors import SwarmError

HOP_SECONDS = 0.05
"""Longest time in the thread: a stopping server waits for it."""


@dataclass
class _Waiting:
    """A task that waits for a request's piece."""

    done: trio.Event = field(default_factory=trio.Event)
    found: Piece | ValueError | None = None


class Driver:
    """Steps the engine while it has requests. Only its thread touches the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.capabilities = engine.capabilities
        self._ids = count()
        self._inbox: deque[Request | int] = deque()
        """Requests to submit, and ids to cancel, in order."""
        self._waiting: dict[int, _Waiting] = {}
        self._live: set[int] = set()
        """Requests that the engine holds; changed in the thread."""
        self._work = trio.Event()

    def next_id(self) -> int:
        """An id that no request has yet."""
        return next(self._ids)

    async def piece(self, request: Request) -> Piece:
        """Generate one request. Raises `ValueError` as `Engine.submit`; cancelling drops it."""
        waiting = self._waiting[request.id] = _Waiting()
        self._put(request)
        try:
            await waiting.done.wait()
        except trio.Cancelled:
            self._waiting.pop(request.id, None)
            self.release(request.id)
            raise
        assert waiting.found is not None
        if isinstance(waiting.found, ValueError):
            raise waiting.found
        return waiting.found

    def release(self, id: int) -> None:
        """Drop a request, or the cache that it kept."""
        self._put(id)

    @property
    def live(self) -> int:
        """Requests under way."""
        return len(self._waiting)

    async def run(self) -> None:
        """Step the engine whenever there is work; raises `SwarmError` when the engine fails."""
        while True:
            await self._work.wait()
            try:
                pieces = await trio.to_thread.run_sync(self._advance)
            except Exception as error:  # an engine may fail in any way, and its state is unknown
                raise SwarmError(
                    f"the engine failed ({type(error).__name__}: {error}); start the endpoint again"
                ) from error
            for id, found in pieces:
                waiting = self._waiting.pop(id, None)
                if waiting is None:
                    self._inbox.append(id)  # cancelled meanwhile: its cache is not wanted
                else:
                    waiting.found = found
                    waiting.done.set()
            if not self._inbox and not self._live:
                self._work = trio.Event()

    def _put(self, item: Request | int) -> None:
        self._inbox.append(item)
        self._work.set()

    def _advance(self) -> list[tuple[int, Piece | ValueError]]:
        """Step until a request is finished or refused, none is left, or `HOP_SECONDS` are over."""
        found: list[tuple[int, Piece | ValueError]] = []
        until = time.perf_counter() + HOP_SECONDS
        while True:
            while self._inbox:
                item = self._inbox.popleft()
                if isinstance(item, int):
                    self._engine.cancel(item)
                    self._live.discard(item)
                    continue
                try:
                    self._engine.submit(item)
                    self._live.add(item.id)
                except ValueError as error:
                    found.append((item.id, error))
            if found or not self._live or time.perf_counter() > until:
                return found
            for piece in self._engine.step():
                self._live.discard(piece.id)
                found.append((piece.id, piece))
