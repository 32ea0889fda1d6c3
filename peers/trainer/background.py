"""Work beside the main loop: one piece at a time, whose failure ends the loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio


class Background:
    """Runs one piece of work at a time in a nursery, beside a loop that may go on meanwhile."""

    def __init__(self, nursery: trio.Nursery) -> None:
        """`nursery` must outlive `run`."""
        self._nursery = nursery
        self._loop = trio.CancelScope()
        self._ended = trio.Event()
        self._ended.set()
        self._error: Exception | None = None

    async def run(self, loop: Callable[[], Awaitable[None]]) -> None:
        """Await `loop`, then the work that it has started. Raises what either raises."""
        with self._loop:
            try:
                await loop()
            finally:
                await self._ended.wait()
        if self._error is not None:
            raise self._error

    async def idle(self) -> None:
        """Wait until no work is running."""
        await self._ended.wait()

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Start a piece of work. None may be running."""
        assert self._ended.is_set()
        self._ended = trio.Event()
        self._nursery.start_soon(self._attempt, work)

    async def _attempt(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:
            self._error = error
            self._loop.cancel()
        finally:
            self._ended.set()
