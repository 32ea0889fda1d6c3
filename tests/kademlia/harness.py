"""A DHT of many peers in one process, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import trio
import trio.testing

from simnet.clock import run_virtual
from swarm.kademlia.dht import Kademlia
from swarm.kademlia.records import InvalidRecord, RecordInfo
from swarm.kademlia.wire import Message, MessageType, Neighbour
from swarm.transport import Transport
from swarm.wire.identity import Identity, PeerId
from swarm.world import Disk
from tests.memory_network import MemoryNetwork
from tests.worlds import WALL, VirtualWorld


class PlainValidator:
    """Values of the form `good <version> <expires_wall_ms> <text>`."""

    def validate(self, key: bytes, value: bytes) -> RecordInfo:
        parts = value.split(b" ", 3)
        if len(parts) != 4 or parts[0] != b"good":
            raise InvalidRecord("not good")
        return RecordInfo((int(parts[1]),), int(parts[2]))


def good(version: int, lifetime_seconds: float = 7 * 3600, text: str = "x") -> bytes:
    """A valid value, issued at the start of the test."""
    return f"good {version} {int((WALL + lifetime_seconds) * 1000)} {text}".encode()


class Peer:
    def __init__(self, transport: Transport, dht: Kademlia, scope: trio.CancelScope) -> None:
        self.transport = transport
        self.dht = dht
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._scope = scope

    @property
    def id(self) -> PeerId:
        return self.transport.peer_id

    @property
    def address(self) -> str:
        return self.transport.addresses()[0]

    def stop(self) -> None:
        """Sudden death."""
        self._scope.cancel()

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == name]


async def closest(peer: Peer, key: bytes) -> list[Neighbour]:
    """The peers nearest to a key that answer `peer` now."""
    return (await peer.dht._contacts.lookup(MessageType.FIND_NODE, key)).closest


Lie = Callable[[Kademlia, Message, Message], Message]
"""The answer of a liar: its DHT, the request, and the honest answer."""


def deceive(dht: Kademlia, lie: Lie) -> None:
    honest = dht._server.answer

    def answer(sender: PeerId, message: Message) -> Message | None:
        truth = honest(sender, message)
        return truth if truth is None else lie(dht, message, truth)

    dht._server.answer = answer  # type: ignore[method-assign]


class Swarm:
    """Starts peers."""

    def __init__(self, nursery: trio.Nursery, seed: int, latency_seconds: float) -> None:
        self.network = MemoryNetwork(latency_seconds=latency_seconds)
        self.peers: list[Peer] = []
        self._nursery = nursery
        self._seed = seed

    async def start(
        self,
        *,
        server: bool = True,
        host: str | None = None,
        lie: Lie | None = None,
        identity: Identity | None = None,
    ) -> Peer:
        number = len(self.peers) + self._seed * 100_000
        identity = identity or Identity(number.to_bytes(32, "big"))
        peer: Peer = await self._nursery.start(self._run, identity, number, server, host, lie)
        self.peers.append(peer)
        return peer

    async def _run(
        self,
        identity: Identity,
        number: int,
        server: bool,
        host: str | None,
        lie: Lie | None,
        *,
        task_status: trio.TaskStatus[Peer],
    ) -> None:
        world = VirtualWorld(number)
        disk = cast(Disk, None)  # nothing here touches the bulk plane
        with trio.CancelScope() as scope:
            async with self.network.transport(
                identity, world=world, disk=disk, host=host
            ) as transport:
                events: list[tuple[str, dict[str, Any]]] = []
                dht = Kademlia(
                    transport,
                    world,
                    {"swarm-run": PlainValidator(), "swarm-peer": PlainValidator()},
                    server=server,
                    emit=lambda name, /, **fields: events.append((name, fields)),
                )
                if lie is not None:
                    deceive(dht, lie)
                peer = Peer(transport, dht, scope)
                peer.events = events
                async with trio.open_nursery() as nursery:
                    await nursery.start(dht.run)
                    task_status.started(peer)

    async def fill(self, count: int, *, hosts: Sequence[str | None] = (None,)) -> list[Peer]:
        """`count` more peers that join through the first one, one after the other."""
        started = []
        for index in range(count):
            peer = await self.start(host=hosts[index % len(hosts)])
            if peer is not self.peers[0]:
                await peer.dht.bootstrap([self.peers[0].address])
            started.append(peer)
        return started


@asynccontextmanager
async def swarm(*, seed: int = 1, latency_seconds: float = 0.02) -> AsyncIterator[Swarm]:
    async with trio.open_nursery() as nursery:
        yield Swarm(nursery, seed, latency_seconds)
        nursery.cancel_scope.cancel()


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    """In virtual time, the same way every time."""
    return run_virtual(test, seed=7)
