"""The thread for a service's heavy work; meanwhile its child process still receives calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import trio

J = TypeVar("J")
R = TypeVar("R")
P = ParamSpec("P")


class JobThread:
    """Does jobs one at a time, in the order of the calls."""

    def __init__(self) -> None:
        self._turn = trio.Lock()

    async def run(self, work: Callable[[J], R], job: J) -> R:
        """Do one job in a worker thread. Cancelling waits until `work` ends or reaches a
        `swarm.world.progress.checkpoint`."""
        async with self._turn:
            return await trio.to_thread.run_sync(work, job)


class _Service(Protocol):
    _thread: JobThread


S = TypeVar("S", bound=_Service)


def in_job_thread(
    work: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Make a service's method run in the service's own `JobThread`, its attribute `_thread`."""

    @functools.wraps(work)
    async def run(self: S, /, *job: P.args, **named: P.kwargs) -> R:
        return await self._thread.run(lambda _: work(self, *job, **named), None)

    return run
