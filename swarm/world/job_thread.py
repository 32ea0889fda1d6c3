"""The thread for a service's heavy work; meanwhile its child process still receives calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

J = TypeVar("J")
R = TypeVar("R")


class JobThread:
    """Does jobs one at a time, in the order of the calls."""

    def __init__(self) -> None:
        self._turn = trio.Lock()

    async def run(self, work: Callable[[J], R], job: J) -> R:
        """Do one job in a worker thread. Cancelling waits until `work` ends or reaches a
        `swarm.world.progress.checkpoint`."""
        async with self._turn:
            return await trio.to_thread.run_sync(work, job)
