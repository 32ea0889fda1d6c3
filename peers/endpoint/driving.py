"""Steps an engine for many requests at once, in a thread beside the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import trio

from peers.engines.engine import Capabilities, Engine, Piece, Request
from peers.engines.guests import Guests
from swarm.errors import SwarmError

HOP_SECONDS = 0.05
"""Longest time in the thread: a stopping server waits for it."""


@dataclass
class _Waiting:
    """A task that waits for a request's piece."""

    done: trio.Event = field(default_factory=trio.Event)
    found: Piece | ValueError | None = None


class Stepper(Protocol):
    """The engine, and the thread in which it is stepped."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def advance(self, guests: Guests) -> None:
        """Step the engine for a while, unless the requests need it no more."""
        ...


class OwnEngine:
    """An engine that has no other requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    async def advance(self, guests: Guests) -> None:
        await trio.to_thread.run_sync(guests.advance, self.engine, HOP_SECONDS)


class Driver:
    """Steps the engine while it has requests."""

    def __init__(self, stepper: Stepper, guests: Guests | None = None) -> None:
        """`guests`: the requests of an engine that others step, too."""
        self.stepper = stepper
        self.capabilities = stepper.capabilities
        self._guests = guests or Guests()
        self._waiting: dict[int, _Waiting] = {}
        self._work = trio.Event()

    def next_id(self) -> int:
        """An id that no request has yet."""
        return self._guests.next_id()

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
        token = trio.lowlevel.current_trio_token()
        self._guests.news = lambda: token.run_sync_soon(self._hand_out, idempotent=True)
        while True:
            await self._work.wait()
            try:
                await self.stepper.advance(self._guests)
            except Exception as error:  # an engine may fail in any way, and its state is unknown
                raise SwarmError(
                    f"the engine failed ({type(error).__name__}: {error}); start the endpoint again"
                ) from error
            self._hand_out()
            if not self._guests.wait:
                self._work = trio.Event()

    def _hand_out(self) -> None:
        """Wake the tasks whose pieces are finished."""
        for id, found in self._guests.taken():
            waiting = self._waiting.pop(id, None)
            if waiting is None:
                self._put(id)  # cancelled meanwhile: its cache is not wanted
            else:
                waiting.found = found
                waiting.done.set()

    def _put(self, item: Request | int) -> None:
        self._guests.put(item)
        self._work.set()
