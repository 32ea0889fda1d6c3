"""Tasks: the lifetime of a component, first errors, and threads for heavy work.

The transport's tasks handle requests, and the transport outlives the component that answers them: a
*lifetime* bounds them, which would go on with a closed database or nursery. A nursery's *first
error* is raised as it is: callers that treat one kind of error specially, such as a child's death,
need the error itself."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import trio

from swarm.errors import leaf_errors


@dataclass(frozen=True)
class Guarded:
    nursery: trio.Nursery
    failed: list[BaseException]

    async def guard(self, task: Callable[[], Awaitable[None]]) -> None:
        """Await a task; its error ends the block, which then raises it."""
        try:
            await task()
        except Exception as error:  # raised by `open_guarded`, outside the nursery's group
            self.failed.extend(leaf_errors(error))  # its own nurseries make groups as well
            self.nursery.cancel_scope.cancel()

    def start_soon(self, task: Callable[[], Awaitable[None]]) -> None:
        self.nursery.start_soon(self.guard, task)


@asynccontextmanager
async def open_guarded() -> AsyncIterator[Guarded]:
    """A nursery for the block; raises the first error of the block or of its guarded tasks."""
    failed: list[BaseException] = []
    async with trio.open_nursery() as nursery:
        try:
            yield Guarded(nursery, failed)
        except Exception as error:  # raised below, outside the nursery's group
            failed.append(error)
            nursery.cancel_scope.cancel()
    if failed:
        raise failed[0]


@asynccontextmanager
async def alongside(
    *tasks: Callable[[], Awaitable[object]], until: Callable[[], Awaitable[object]] | None = None
) -> AsyncIterator[None]:
    """Run tasks beside the block, until it or `until` ends. Raises as `open_guarded`."""
    async with open_guarded() as guarded:

        async def run(task: Callable[[], Awaitable[object]], ends: bool) -> None:
            await task()
            if ends:
                guarded.nursery.cancel_scope.cancel()

        for task in (*tasks, *([until] if until else [])):
            guarded.start_soon(functools.partial(run, task, task is until))
        yield
        guarded.nursery.cancel_scope.cancel()


T = TypeVar("T")


class Lifetime:
    """A block in which tasks of other components may work for this one.

    `async with Lifetime() as lifetime:` cancels the tasks in `lifetime.run` at its end and waits
    for them."""

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

    async def __aenter__(self) -> "Lifetime":
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


class held:  # noqa: N801 — reads as `async with held(lock)`
    """Holds a lock inside the block. A free one is taken at once, where `async with lock` gives all
    other tasks a turn first: use it around what waits anyway."""

    __slots__ = ("_lock",)

    def __init__(self, lock: trio.Lock) -> None:
        self._lock = lock

    async def __aenter__(self) -> None:
        try:
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            await self._lock.acquire()

    async def __aexit__(self, *raised: object) -> None:
        self._lock.release()


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
