"""Whole trusted peers in one process, in virtual time: real nodes over the memory network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
import trio.testing

from swarm.events import Event, Events
from swarm.gossip.topics import RUN, WORK
from swarm.kademlia.dht import Kademlia
from swarm.ledger import merkle
from swarm.ledger.client import open_ledger, own_head
from swarm.ledger.entries import Entry, decode
from swarm.ledger.receipts import Receipt, receipts_from
from swarm.node.node import Node, create_tables
from swarm.node.run_node import RunNode
from swarm.node.trusted import TrustedPart
from swarm.run.records import record_validators
from swarm.run.run import Run
from swarm.settings import PeerSettings
from swarm.wire.envelope import Sequencer
from swarm.wire.identity import Identity, PeerId
from swarm.wire.messages import LogHead, Verdict
from swarm.world.disk import LocalDatabase, LocalDisk
from tests.memory_network import MemoryNetwork
from tests.network.harness import identity, manifest, sealed, sealed_manifest
from tests.worlds import VirtualWorld

__all__ = ["Peer", "Swarm", "identity", "in_virtual_time", "manifest", "sealed", "verdict_at"]

OWNER, TRAINER, ALICE, BOB, WORKER = (identity(number) for number in range(1, 6))


class InlineDatabase(LocalDatabase):
    """Transactions in place: virtual time must not jump while a thread works."""

    async def transact(self, function):
        await trio.lowlevel.checkpoint()
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            result = function(self._connection)
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")
        return result


class InlineDisk(LocalDisk):
    def database(self, path: str) -> InlineDatabase:
        return InlineDatabase(self.local_path(path))


class Peer:
    """A running peer of the run."""

    def __init__(self, node: Node, run_node: RunNode, seen: list[Event]) -> None:
        self.node = node
        self.run_node = run_node
        self.seen = seen

    @property
    def trusted(self) -> TrustedPart:
        assert self.run_node._trusted is not None
        return self.run_node._trusted

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait in virtual time; fails naming `what` after a minute of it."""
        with trio.move_on_after(60):
            while not holds():  # noqa: ASYNC110 (virtual time)
                await trio.sleep(0.1)
        assert holds(), what

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event.fields for event in self.seen if event.name == name]


class Swarm:
    """A run with a trainer and two validators; peers come and go, their homes stay."""

    def __init__(self, folder: Path, trainers: Sequence[Identity] = (TRAINER,)) -> None:
        self.folder = folder
        self.network = MemoryNetwork(latency_seconds=0.005)
        self.manifest = sealed_manifest(OWNER, manifest(trainers, [ALICE, BOB]))
        self.run = Run(self.manifest).id
        self.settings: dict[str, Any] = {}
        """Settings of the peers that start from now on."""
        self._addresses: dict[str, Sequence[str]] = {}

    @asynccontextmanager
    async def peer(self, key: Identity) -> AsyncIterator[Peer]:
        """A peer that takes part inside this block, connected to everybody who is there."""
        async with self.apart(key) as peer, peer.run_node.joined():
            yield peer

    @asynccontextmanager
    async def apart(self, key: Identity) -> AsyncIterator[Peer]:
        """A peer in the network, connected to everybody who is there, that does not take part."""
        home = self.folder / key.peer_id
        world = VirtualWorld(int.from_bytes(key.seed, "big"))
        disk = InlineDisk(home)
        database = disk.database("peer.sqlite")
        await create_tables(database)
        events = Events(world, key.peer_id)
        seen: list[Event] = []
        events.add_sink(seen.append)
        async with (
            self.network.transport(key, world=world, disk=disk) as transport,
            trio.open_nursery() as nursery,
        ):
            dht = Kademlia(transport, world, record_validators(world.wall_time))
            await nursery.start(dht.run)
            node = Node(
                identity=key,
                world=world,
                disk=disk,
                compute=None,  # type: ignore[arg-type]
                transport=transport,
                dht=dht,
                events=events,
                settings=PeerSettings(role=["observer"], **self.settings),
                database=database,
                sequencer=Sequencer(database, world.wall_time),
            )
            node.serve_manifests()
            for peer in sorted(self._addresses):
                await transport.connect(peer, self._addresses[peer])  # type: ignore[arg-type]
            self._addresses[key.peer_id] = transport.addresses()
            try:
                yield Peer(node, RunNode(node, Run(self.manifest), (RUN, WORK)), seen)
            finally:
                del self._addresses[key.peer_id]
                database.close()
            nursery.cancel_scope.cancel()


def verdict_at(number: int, worker: Identity = WORKER, **changes: Any) -> Callable[[int], Verdict]:
    """What a validator gives `append_verdict`: submission `number` of a worker, accepted."""

    def make(index: int) -> Verdict:
        return Verdict(
            **{
                "submission": number.to_bytes(32, "big"),
                "size_bytes": 1000,
                "worker": worker.peer_id,
                "lineage": 0,
                "step": 0,
                "policy": 0,
                "number": number,
                "outcome": "accepted",
                "rewards": [[1.0, 0.0], [0.0, 0.0]],
                "log_index": index,
                "tokens": 40,
                **changes,
            }
        )

    return make


async def fetch(node: Node, peer: PeerId) -> list[Entry]:
    """The whole log of one trusted peer, of which nothing is pruned, as its signed head has it."""
    await node.reach(peer)
    async with open_ledger(node.transport, peer) as client:
        head = (await own_head(client)).expect(LogHead)
        raws: list[bytes] = []
        while len(raws) < head.size:
            raws += await client.entries(peer, len(raws), head.size - len(raws))
    peaks = merkle.Peaks()
    for raw in raws:
        peaks.append(merkle.leaf_hash(raw))
    assert peaks.root() == head.root
    return [decode(raw) for raw in raws]


async def receipts(node: Node, peer: PeerId, worker: str) -> list[Receipt]:
    """A worker's receipts of one validator."""
    await node.reach(peer)
    found: list[Receipt] = []
    async with open_ledger(node.transport, peer) as client:
        head, start = await own_head(client), 0
        while start is not None:
            page, start = await receipts_from(client, head, start, worker)  # type: ignore[assignment]
            found += page
    return found


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
