"""The child processes of an environment peer, each of which plays one call at a time.

A call that hangs, crashes or takes too much memory ends its child alone, which is replaced.
"""

from __future__ import annotations

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


@dataclass(eq=False)
class _Call:
    use: Callable[[EnvironmentService], Awaitable[Any]]
    done: trio.Event = field(default_factory=trio.Event)
    result: Any = None
    error: SwarmError | None = None
    given_up: bool = False

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
            self.error = CallFailed(str(error))
        except ChildError as error:
            self.error, usable = error, True
        finally:
            if not usable and self.error is None:
                self.error = CallFailed("the environment peer is leaving")
            self.done.set()
        return usable


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
        self._given, self._taken = trio.open_memory_channel[_Call](waiting_max)

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
            while True:
                call = await self._taken.receive()
                if not call.given_up and not await call.run(service, self._seconds_max):
                    return

    async def call(self, use: Callable[[EnvironmentService], Awaitable[T]]) -> T:
        """Use the next free child for one call.

        Raises `CallFailed` if too many calls wait, if the child dies or the call takes longer than
        `seconds_max`, and the `ChildError` of a method that raised.
        """
        call = _Call(use)
        try:
            self._given.send_nowait(call)
        except trio.WouldBlock:
            raise CallFailed("too many calls wait for the environment") from None
        try:
            await call.done.wait()
        finally:
            call.given_up = True
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result
