"""How long a part of this peer is there for others.

Requests are answered in tasks of the transport, which outlives the part that answers them. Without
a bound they would go on after it: on a closed database, in a nursery that takes no more tasks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

import trio

T = TypeVar("T")


class Lifetime:
    """`async with Lifetime() as lifetime:` is how long others' tasks may work for a part. When the
    block is left, those at it are cancelled, and have ended."""

    def __init__(self) -> None:
        self._at_work: dict[trio.CancelScope, None] = {}  # in order: cancelling must be repeatable
        self._over = False
        self._idle = trio.Event()

    async def run(self, work: Callable[..., Awaitable[T]], *arguments: object) -> T | None:
        """What `work(*arguments)` returns; None if the lifetime ends first, or has ended."""
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
            with trio.CancelScope(shield=True):  # as a nursery waits for its tasks
                await self._idle.wait()
