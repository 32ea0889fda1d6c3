"""A nursery whose first error is raised as it is, not in an exception group.

Callers that treat one kind of error specially, such as a child's death, need the error itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio


@dataclass(frozen=True)
class Guarded:
    """The nursery of `open_guarded`."""

    nursery: trio.Nursery
    failed: list[Exception]

    async def guard(self, task: Callable[[], Awaitable[None]]) -> None:
        """Await a task; its error ends the block, which then raises it."""
        try:
            await task()
        except Exception as error:  # raised by `open_guarded`, outside the nursery's group
            self.failed.append(error)
            self.nursery.cancel_scope.cancel()

    def start_soon(self, task: Callable[[], Awaitable[None]]) -> None:
        """Start a task; see `guard`."""
        self.nursery.start_soon(self.guard, task)


@asynccontextmanager
async def open_guarded() -> AsyncIterator[Guarded]:
    """A nursery for the block; raises the first error of the block or of its guarded tasks."""
    failed: list[Exception] = []
    async with trio.open_nursery() as nursery:
        try:
            yield Guarded(nursery, failed)
        except Exception as error:  # raised below, outside the nursery's group
            failed.append(error)
            nursery.cancel_scope.cancel()
    if failed:
        raise failed[0]
