"""The child processes of an environment peer, each of which plays one call at a time.

A call that hangs, crashes or takes too much memory ends its child alone, which is replaced.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import trio

from swarm.errors import SwarmError
from swarm.jobs.environment import EnvironmentService, EnvironmentSetup
from swarm.node.node import Node
from swarm.world import ChildDied, ChildError, client
from swarm.world.restarts import Restarts

T = TypeVar("T")

SERVICE = "peers.environment.service:EnvironmentPeerService"


class CallFailed(SwarmError):
    """A call ended its child, took too long, or found no child; another attempt may succeed."""


class TooBusy(CallFailed):
    """Too many calls wait already."""


@dataclass(eq=False)
class _Call:
    client: str
    use: Callable[[EnvironmentService], Awaitable[Any]]
    done: trio.Event = field(default_factory=trio.Event)
    result: Any = None
    error: SwarmError | None = None

    async def run(self, service: EnvironmentService, seconds_max: float) -> bool:
        """Run the call; returns whether the child can take another."""
        usable = False
        try:
            with trio.move_on_after(seconds_max) as scope:
                self.result = await self.use(service)
                usable = True
            if scope.cancelled_caught:
                self.error = CallFailed(f"the environment took longer than {seconds_max:g} s")
        except ChildDied as error:
            self.error = CallFailed(error.hung or str(error))
        except ChildError as error:
            self.error, usable = error, True
        finally:
            if not usable and self.error is None:
                self.error = CallFailed("the environment peer is leaving")
            self.done.set()
        return usable


class _Queue:
    """Calls that wait for a child, by client.

    The next is one of the client with the fewest calls in children, and then with the least time in
    them, so that a client whose calls hang delays itself more than others.
    """

    def __init__(self, most: int, now: Callable[[], float]) -> None:
        self._most, self._now = most, now
        self._waiting: dict[str, deque[_Call]] = {}
        self._count = 0
        self._running: Counter[str] = Counter()
        self._used: dict[str, float] = {}
        """Seconds in children, of clients that had more than the last client to be served."""
        self._level = 0.0
        """Seconds of the last client to be served; a new client begins with as many."""
        self._arrived = trio.Event()

    def put(self, call: _Call) -> None:
        """Raises `TooBusy`."""
        if self._count >= self._most:
            raise TooBusy("too many calls wait for the environment")
        self._waiting.setdefault(call.client, deque()).append(call)
        self._count += 1
        self._arrived.set()

    def drop(self, call: _Call) -> None:
        """Remove a call that nobody waits for any more, if it still waits for a child."""
        calls = self._waiting.get(call.client)
        if calls is not None and call in calls:
            calls.remove(call)
            self._took(call.client)

    async def run_next(self, run: Callable[[_Call], Awaitable[bool]]) -> bool:
        """Await `run` with the next call, and count its time; returns its result."""
        while not self._waiting:
            self._arrived = trio.Event()
            await self._arrived.wait()
        client = min(self._waiting, key=lambda each: (self._running[each], self._seconds(each)))
        call = self._waiting[client].popleft()
        self._took(client)
        self._level = max(self._level, self._seconds(client))
        self._running[client] += 1
        began = self._now()
        try:
            return await run(call)
        finally:
            self._running[client] -= 1
            self._running += Counter()  # drops zeros
            used = self._seconds(client) + self._now() - began
            self._used = {name: each for name, each in self._used.items() if each > self._level}
            self._used[client] = used

    def _seconds(self, client: str) -> float:
        return max(self._level, self._used.get(client, 0.0))

    def _took(self, client: str) -> None:
        self._count -= 1
        if not self._waiting[client]:
            del self._waiting[client]


class Pool:
    """Several children with the same environments."""

    def __init__(
        self,
        node: Node,
        *,
        children: int,
        waiting_max: int,
        seconds_max: float,
        memory_bytes_max: int,
        interpreter: str | None,
    ) -> None:
        """`waiting_max`: calls that may wait for a child."""
        self._node = node
        self._children = children
        self._seconds_max = seconds_max
        self._memory_bytes_max = memory_bytes_max
        self._interpreter = interpreter
        self._queue = _Queue(waiting_max, node.world.now)

    async def run(
        self,
        setup: EnvironmentSetup,
        check: Callable[[EnvironmentService], Awaitable[None]],
    ) -> None:
        """Keep the children running until cancelled; each passes `check` before its first call.

        Raises the error of a check, and `ChildDied` when a child cannot start.
        """
        names = ["environment", *(f"environment-{n}" for n in range(2, self._children + 1))]
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(self._keep, name, setup, check)

    async def _keep(
        self,
        name: str,
        setup: EnvironmentSetup,
        check: Callable[[EnvironmentService], Awaitable[None]],
    ) -> None:
        restarts = Restarts(self._node.events, name)
        while True:
            await restarts.run(partial(self._live, name, setup, check, restarts))

    async def _live(
        self,
        name: str,
        setup: EnvironmentSetup,
        check: Callable[[EnvironmentService], Awaitable[None]],
        restarts: Restarts,
    ) -> None:
        """Run calls until one of them leaves the child unusable."""
        async with self._node.compute.child(
            SERVICE,
            setup,
            name=name,
            memory_limit_bytes=self._memory_bytes_max,
            interpreter=self._interpreter,
        ) as child:
            service = client(EnvironmentService, child)
            await check(service)
            restarts.succeeded()
            while await self._queue.run_next(lambda call: call.run(service, self._seconds_max)):
                pass

    async def call(self, client: str, use: Callable[[EnvironmentService], Awaitable[T]]) -> T:
        """Use a free child for one call. `client`: by whom the children's time is divided.

        Raises `TooBusy` if too many calls wait, `CallFailed` if the child dies or the call takes
        longer than `seconds_max`, and the `ChildError` of a method that raised.
        """
        call = _Call(client, use)
        self._queue.put(call)
        try:
            await call.done.wait()
        finally:
            self._queue.drop(call)
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result
