"""Peers with a store, a fetcher and a service on a network in memory."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest import mock

import trio
import trio.testing

from swarm.events import Event, Events
from swarm.shardcast.chain import Deltas
from swarm.shardcast.fetch.fetcher import Fetcher
from swarm.shardcast.have.streams import HaveExchange
from swarm.shardcast.held import Held
from swarm.shardcast.service import BlobService
from swarm.shardcast.store import CheckpointStore
from swarm.shardcast.uploads import Uploads
from swarm.transport import Source, Transport
from swarm.transport.libp2p import open_libp2p
from swarm.wire.identity import Identity
from swarm.wire.messages import Checkpoint
from swarm.world import Child, ChildError, Compute, Disk, Job, Setup, World
from swarm.world.disk import LocalDisk
from swarm.world.machine import Machine
from tests.memory_network import MemoryNetwork
from tests.shardcast.memory_disk import MemoryDisk
from tests.worlds import VirtualWorld

RUN = "owner/run"
T = TypeVar("T")


class InPlace:
    """`swarm.world.Compute` without processes: a "child" works in place. `before(method)` may
    raise, as a child that dies does."""

    def __init__(self, before: Callable[[str], None] = lambda method: None) -> None:
        self.before = before
        self.calls: list[str] = []

    def free_memory_bytes(self) -> int:
        return 1 << 30

    @asynccontextmanager
    async def child(
        self,
        service: str,
        setup: Setup | None = None,
        *,
        name: str,
        memory_limit_bytes: int | None = None,
        start_deadline_seconds: float = 60.0,
        interpreter: str | None = None,
    ) -> AsyncIterator[Child]:
        module, _, kind = service.partition(":")
        assert setup is None
        yield _ChildInPlace(self, name, getattr(importlib.import_module(module), kind)())


_Partial: Any = object
"""Base of a double that lacks what no test asks of it: mypy lets it stand for the whole."""


async def _run_here(function: Callable[..., T], *arguments: Any) -> T:
    """Instead of in a thread, for which a clock that jumps does not wait."""
    return function(*arguments)


class _ChildInPlace(_Partial):
    def __init__(self, compute: InPlace, name: str, service: Any) -> None:
        self.name = name
        self._compute = compute
        self._service = service

    async def request(self, method: str, job: Job, reply: type[T]) -> T:
        await trio.lowlevel.checkpoint()
        self._compute.before(method)
        self._compute.calls.append(method)
        try:
            with mock.patch.object(trio.to_thread, "run_sync", _run_here):
                result: T = await getattr(self._service, method)(job)
        except Exception as error:
            raise ChildError(str(error), type(error).__name__) from error
        return result


class Recorder:
    """Events of one peer."""

    def __init__(self, events: Events) -> None:
        self.all: list[Event] = []
        events.add_sink(self.all.append)

    def named(self, name: str) -> list[Event]:
        return [event for event in self.all if event.name == name]


async def put_folder(disk: MemoryDisk, folder: str, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        await disk.write(f"{folder}/{name}", data)


def announcement(held: Held) -> Checkpoint:
    return Checkpoint(reference=held.reference, total_bytes=held.manifest.total_bytes)


@dataclass
class Peer:
    transport: Transport
    disk: MemoryDisk
    store: CheckpointStore
    fetcher: Fetcher
    have: HaveExchange | None
    service: BlobService
    events: Recorder
    deltas: Deltas | None = None

    @property
    def source(self) -> Source:
        return Source(self.transport.peer_id, tuple(self.transport.bulk_addresses()))

    async def connect(self, *others: Peer) -> None:
        for other in others:
            await self.transport.connect(other.transport.peer_id, other.transport.addresses())

    async def publish(self, step: int, files: dict[str, bytes], lineage: int = 0) -> Checkpoint:
        await put_folder(self.disk, "made", files)
        held = await self.store.publish("made", lineage, step)
        return announcement(held)


@asynccontextmanager
async def peer(
    network: MemoryNetwork,
    number: int,
    *,
    disk: MemoryDisk | None = None,
    have: bool = False,
    keep: int = 5,
) -> AsyncIterator[Peer]:
    """A peer in memory."""
    identity = Identity(number.to_bytes(32, "big"))
    world = VirtualWorld(number)
    disk = disk or MemoryDisk()
    async with (
        network.transport(identity, world=world, disk=disk) as transport,
        assembled(world, transport, disk, have=have, keep=keep) as one,
    ):
        yield one


@asynccontextmanager
async def peers(
    network: MemoryNetwork, count: int, *, have: bool = False
) -> AsyncIterator[list[Peer]]:
    """Peers 1 to `count`."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(peer(network, number, have=have))
            for number in range(1, count + 1)
        ]


@asynccontextmanager
async def delta_peer(
    network: MemoryNetwork, number: int, home: Path, *, compute: InPlace | None = None
) -> AsyncIterator[Peer]:
    """A peer on the network in memory with real files below `home`, that knows deltas."""
    identity = Identity(number.to_bytes(32, "big"))
    world = Machine()
    disk = LocalDisk(home)
    async with (
        network.transport(identity, world=world, disk=disk) as transport,
        assembled(world, transport, disk, have=True, compute=compute or InPlace()) as one,
    ):
        yield one


@asynccontextmanager
async def delta_peers(
    network: MemoryNetwork, folder: Path, count: int
) -> AsyncIterator[list[Peer]]:
    """Peers 1 to `count` that know deltas, each with the home of its number."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(delta_peer(network, number, folder / str(number)))
            for number in range(1, count + 1)
        ]


@asynccontextmanager
async def real_peer(
    number: int,
    home: Path,
    *,
    compute: Compute | None = None,
    uplink_bytes_per_second: float | None = None,
) -> AsyncIterator[Peer]:
    """A peer with sockets on loopback and files below `home`; with `compute` it knows deltas."""
    identity = Identity(number.to_bytes(32, "big"))
    world = Machine()
    disk = LocalDisk(home)
    async with (
        open_libp2p(
            identity,
            ["/ip4/127.0.0.1/tcp/0"],
            world=world,
            disk=disk,
            uplink_bytes_per_second=uplink_bytes_per_second,
        ) as transport,
        assembled(world, transport, disk, have=True, compute=compute) as one,
    ):
        yield one


@asynccontextmanager
async def assembled(
    world: World,
    transport: Transport,
    disk: Disk,
    *,
    have: bool,
    keep: int = 5,
    compute: Compute | None = None,
) -> AsyncIterator[Peer]:
    events = Events(world, transport.peer_id)
    recorder = Recorder(events)
    async with trio.open_nursery() as nursery:
        store = CheckpointStore(disk, RUN, events, keep=keep)
        await store.recover()
        exchange = HaveExchange(world, transport, store, events) if have else None
        deltas = Deltas(store, compute, events) if compute is not None else None
        fetcher = Fetcher(world, transport, store, events, have=exchange, deltas=deltas)
        service = BlobService(
            lambda peer, credential: True, store=store, uploads=Uploads(world, transport, store)
        )
        transport.serve_bulk(service)
        if exchange is not None:
            await nursery.start(exchange.run)
        # The tests look into a disk in memory; a real one they only read through its interface.
        yield Peer(
            transport, cast(MemoryDisk, disk), store, fetcher, exchange, service, recorder, deltas
        )
        nursery.cancel_scope.cancel()


def same_files(disk: MemoryDisk, folder: str, files: dict[str, bytes]) -> bool:
    return all(disk.data(f"{folder}/{n}") == data for n, data in files.items())
