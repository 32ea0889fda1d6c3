"""Lifetime of a component that serves requests.

The transport's tasks handle requests, and the transport outlives the component that answers them.
Without a bound these tasks would continue after the component's end, with a closed database or a
closed nursery.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

import trio

T = TypeVar("T")


class Lifetime:
    """A block in which tasks of other components may work for this one.

    `async with Lifetime() as lifetime:` cancels the tasks in `lifetime.run` at its end and waits
    for them.
    """

    def __init__(self) -> None:
        self._at_work: dict[trio.CancelScope, None] = {}  # ordered, so that runs are repeatable
        self._over = False
        self._idle = trio.Event()

    async def run(self, work: Callable[..., Awaitable[T]], *arguments: object) -> T | None:
        """Return the result of `work(*arguments)`; None if the lifetime ends first or has ended."""
        if self._over:
            return None
        with trio.CancelScope() as scope:
            self._at_work[scope] = None
            try:
                return await work(*arguments)
            finally:
                del self._at_work[scope]
                if self._over and not self._at_work:
                    self._idle.set()
        return None

    async def __aenter__(self) -> Lifetime:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over = True
        for scope in self._at_work:
            scope.cancel()
        if self._at_work:
            with trio.CancelScope(shield=True):  # a nursery waits for its tasks in the same way
                await self._idle.wait()
