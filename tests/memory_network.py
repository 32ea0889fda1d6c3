"""The simulated network for tests of one part: lines without limits, no loss, any clock of trio's.

network = MemoryNetwork()
async with (
    network.transport(alice, world=world, disk=disk_a) as a,
    network.transport(bob, world=world, disk=disk_b) as b,
):
    await a.connect(b.peer_id, b.addresses())
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from simnet.clock import Action, Timeline
from simnet.lines import Line, Weather
from simnet.network import SimulatedNetwork
from simnet.transport import SimulatedTransport
from swarm.transport import ConnectError, DialFailure
from swarm.wire.identity import Identity, PeerId
from swarm.world import Disk, World

LINE = Line(uplink_bytes_per_second=1e12, downlink_bytes_per_second=1e12)

CLOSED = "it closed the connection at once"


class _Timeline(Timeline):
    """Needs no clock of the simulator's: a task does what is due."""

    def __init__(self) -> None:
        super().__init__()
        self._sleep = trio.CancelScope()

    def at(self, time: float, name: str, number: int, action: Action, *args: Any) -> None:
        super().at(time, name, number, action, *args)
        self._sleep.deadline = min(self._sleep.deadline, time)

    def at_link(self, time: float, link: int, number: int, action: Action, *args: Any) -> None:
        super().at_link(time, link, number, action, *args)
        self._sleep.deadline = min(self._sleep.deadline, time)

    async def run(self) -> None:
        while True:
            with trio.CancelScope(deadline=self.next_time()) as self._sleep:
                await trio.sleep_forever()
            self.do_due(trio.current_time())


class MemoryNetwork(SimulatedNetwork):
    """At work from its first transport until the end of `trio.run`."""

    def __init__(self, *, latency_seconds: float = 0.0) -> None:
        super().__init__(weather=Weather(jitter=0.0, loss=0.0, local_seconds=latency_seconds))
        self.timeline = self.flows._timeline = _Timeline()
        self.full: set[PeerId] = set()
        """Peers that close every new connection at once."""
        self._runs = False

    @asynccontextmanager
    async def transport(  # type: ignore[override]
        self, identity: Identity, *, world: World, disk: Disk, host: str | None = None
    ) -> AsyncIterator[SimulatedTransport]:
        """A peer's transport. `host`: its IPv4 address; by default one of a private network."""
        if not self._runs:
            self._runs = True
            trio.lowlevel.spawn_system_task(self.timeline.run)
        number = self._hosts.setdefault(identity.peer_id, len(self._hosts))
        host = host or f"10.{number >> 8}.{number & 255}.1"
        async with super().transport(
            identity, world=world, disk=disk, line=LINE, host=host
        ) as transport:
            connect = transport.connect

            async def connect_if_there_is_room(peer: PeerId, addresses: Sequence[str]) -> None:
                if peer in self.full and peer not in transport.connections:
                    closed = [
                        DialFailure(a, CLOSED, may_pass=True, turned_away=True) for a in addresses
                    ]
                    raise ConnectError(f"cannot connect to {peer}: {CLOSED}", closed)
                await connect(peer, addresses)

            transport.connect = connect_if_there_is_room  # type: ignore[method-assign]
            yield transport

    def drop(self, a: PeerId, b: PeerId) -> None:
        """Break the connection of two peers; both notice at once."""
        for sender, receiver in ((a, b), (b, a)):
            connection = self._connection(sender, receiver)
            if connection is not None:
                connection.lose()

    def sever(self, a: PeerId, b: PeerId) -> None:
        """Cut two peers off from each other; both notice at once. `heal` undoes it."""
        self.cut(a, b)
        self.drop(a, b)
