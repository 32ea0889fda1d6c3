"""Experiments with one protocol alone: production's DHT or gossip on the simulated network.

Without roles, disks and ledgers a peer costs little, so that experiments with a thousand peers take
minutes. `benchmarks.simulator` prints the figures; the tests use fewer peers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import trio

from simnet.clock import EPOCH, SimulatedWorld, derive, run_virtual, source
from simnet.disk import SimulatedDisk
from simnet.lines import Line, Weather
from simnet.network import SimulatedNetwork
from simnet.scenarios.parts import draw_line, summary
from simnet.transport import SimulatedTransport
from swarm.errors import PeerError
from swarm.events import Events
from swarm.gossip.gossip import Gossip
from swarm.gossip.slots import NEIGHBOURS_WANTED
from swarm.gossip.topics import RUN
from swarm.kademlia.dht import Kademlia
from swarm.kademlia.publishing import REPUBLISH_SECONDS
from swarm.kademlia.records import RecordInfo
from swarm.wire.envelope import STATE_LIFETIME_SECONDS, Gate, seal
from swarm.wire.identity import Identity
from swarm.wire.messages import CheckpointReference, StepOrder

ARRIVALS_PER_SECOND = 20.0
SETTLING_SECONDS = 60.0
HEARING_SECONDS = 30.0
"""Time in which an announcement must reach all peers."""
RUN_ID = "experiment"


_Parts = tuple[Identity, SimulatedWorld, SimulatedTransport]


@asynccontextmanager
async def _machine(network: SimulatedNetwork, name: str, line: Line) -> AsyncIterator[_Parts]:
    identity = Identity(derive(network.seed, "key", name))
    world, disk = SimulatedWorld(network.seed, name), SimulatedDisk(name)
    async with network.transport(identity, world=world, disk=disk, line=line) as transport:
        yield identity, world, transport


# --- the DHT ---


class _AnyValue:
    """Accepts every record, for a day: the experiment does not measure signatures."""

    def validate(self, key: bytes, value: bytes) -> RecordInfo:
        return RecordInfo(version=(1,), expires_wall_ms=int((EPOCH + 86400) * 1000))


@dataclass
class _DhtPeer:
    transport: SimulatedTransport
    dht: Kademlia
    scope: trio.CancelScope


class _Dht:
    """Peers that only serve and query the DHT."""

    def __init__(self, network: SimulatedNetwork, nursery: trio.Nursery) -> None:
        self.peers: list[_DhtPeer] = []
        self.hops: list[int] = []
        """Hops of each record lookup."""
        self._network = network
        self._random = source(network.seed, "experiment")
        self._nursery = nursery
        self._made = 0

    async def grow(self, peers: int) -> None:
        """Start this many peers, which join one after another."""
        await self._start()
        async with trio.open_nursery() as nursery:
            for _ in range(peers - 1):
                nursery.start_soon(self._start)
                await trio.sleep(1 / ARRIVALS_PER_SECOND)
        await trio.sleep(SETTLING_SECONDS)

    async def _start(self) -> None:
        """Start one more peer; return once it has joined."""
        self._made += 1
        name = f"peer-{self._made}"
        peer: _DhtPeer = await self._nursery.start(self._live, name, name=name)
        if self.peers:
            # Newcomers bootstrap from the first peers, which stay.
            await peer.dht.bootstrap(self.peers[0].transport.addresses())
        self.peers.append(peer)

    async def _live(self, name: str, *, task_status: trio.TaskStatus[_DhtPeer]) -> None:
        line = draw_line(source(self._network.seed, "line", name))
        with trio.CancelScope() as scope:
            async with _machine(self._network, name, line) as (_, world, transport):
                dht = Kademlia(transport, world, {"swarm-peer": _AnyValue()}, emit=self._hear)
                peer = _DhtPeer(transport, dht, scope)
                async with trio.open_nursery() as nursery:
                    await nursery.start(dht.run)
                    task_status.started(peer)

    def _hear(self, name: str, /, **fields: Any) -> None:
        if name == "dht.lookup_finished" and fields["kind"] == "GET_VALUE":
            self.hops.append(fields["hops"])

    def _stop_one(self, *, power: bool) -> None:
        """Stop a peer without notice: its process dies, or with `power` its machine."""
        peer = self._random.choice(self.peers[1:])
        self.peers.remove(peer)
        if power:
            self._network.cut_power(peer.transport.peer_id)
        peer.scope.cancel()

    async def store(self, records: int) -> list[bytes]:
        """Store records from random peers; return their keys."""
        keys = [b"/swarm-peer/record-%d" % number for number in range(records)]
        for key in keys:
            await self._random.choice(self.peers).dht.put(key, b"value of " + key)
        return keys

    async def found(self, keys: Sequence[bytes], lookups: int, seconds: float) -> float:
        """Share of `lookups` that find a record, from random peers, spread over `seconds`."""
        successes = 0

        async def look_up() -> None:
            nonlocal successes
            asking = self._random.choice(self.peers)
            try:
                found = await asking.dht.get(self._random.choice(keys)) is not None
            except PeerError:
                found = False
            # A lookup does not count as failed if its peer leaves meanwhile.
            successes += found or asking.scope.cancel_called

        async with trio.open_nursery() as nursery:
            for _ in range(lookups):
                nursery.start_soon(look_up)
                await trio.sleep(seconds / lookups)
        return successes / lookups

    async def found_in_churn(self, keys: Sequence[bytes], lookups: int, seconds: float) -> float:
        """`found` while 20 % of the peers are replaced per 10 minutes."""
        replaced = round(0.2 * len(self.peers) * seconds / 600.0)
        found = 0.0

        async def look_up() -> None:
            nonlocal found
            found = await self.found(keys, lookups, seconds)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look_up)
            for number in range(replaced):
                await trio.sleep(seconds / replaced)
                self._stop_one(power=bool(number % 2))
                nursery.start_soon(self._start)
        return found

    async def kept(self, keys: Sequence[bytes]) -> float:
        """Share of the records left after half of the peers have gone within one republish
        interval."""
        left = len(self.peers) // 2
        for number in range(left):
            await trio.sleep(REPUBLISH_SECONDS / left)
            self._stop_one(power=bool(number % 2))
        values = [await self._random.choice(self.peers).dht.get(key) for key in keys]
        return sum(value is not None for value in values) / len(keys)


def measure_dht(
    peers: int,
    seed: int = 1,
    *,
    records: int = 200,
    lookups: int = 2000,
    churn_seconds: float = 600.0,
) -> dict[str, Any]:
    """Measure the share of successful DHT lookups in three conditions, and hops without faults.

    The conditions: no faults; 20 % of the peers replaced per 10 minutes; and after half of the
    other peers have left within one republish interval.
    """

    async def main() -> dict[str, Any]:
        network = SimulatedNetwork(seed)
        async with trio.open_nursery() as nursery, network.running():
            dht = _Dht(network, nursery)
            await dht.grow(peers)
            joined = network.messages
            keys = await dht.store(records)
            dht.hops.clear()
            calm = await dht.found(keys, lookups, 120.0)
            hops = list(dht.hops)
            churned = await dht.found_in_churn(keys, lookups, churn_seconds)
            kept = await dht.kept(keys)
            nursery.cancel_scope.cancel()
        return {
            "virtual_seconds": round(trio.current_time(), 1),
            "messages": network.messages,
            "messages_per_peer_joining": round(joined / peers, 1),
            "lookups_found": calm,
            "lookups_found_in_churn": churned,
            "records_after_half_left": kept,
            "hops_median": median(hops),
            "hops_max": max(hops),
            "contacts_median": median(len(peer.dht.table) for peer in dht.peers),
        }

    return run_virtual(main, seed=seed)


# --- gossip ---


class _Members:
    """Peers that only gossip."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self.heard: dict[int, list[float]] = {}
        """When the announcement of each number reached each peer."""
        self._network = network
        self._chance = source(network.seed, "experiment")
        self._members: list[tuple[Identity, SimulatedWorld, SimulatedTransport, Gossip]] = []

    async def live(self, name: str, *, task_status: trio.TaskStatus[None]) -> None:
        line = draw_line(self._chance)
        async with _machine(self._network, name, line) as (identity, world, transport):
            gossip = Gossip(
                transport,
                Gate(world, RUN_ID, lambda sender, message: None, lambda sender: False),
                Events(world, identity.peer_id),
                [RUN],
                records=lambda most: [],
                learn_record=lambda record: None,
                admits=lambda peer, shown: True,
            )
            gossip.listen(
                StepOrder,
                lambda envelope: self.heard[envelope.body.sequence].append(trio.current_time()),
            )
            self._members.append((identity, world, transport, gossip))
            async with trio.open_nursery() as nursery:
                await nursery.start(gossip.run)
                task_status.started()

    async def connect(self) -> float:
        """Connect each peer to some others; return the median number of neighbours."""
        async with trio.open_nursery() as dialling:
            for _, _, transport, _ in self._members:
                for _, _, other, _ in self._chance.sample(self._members, NEIGHBOURS_WANTED):
                    if other is not transport:
                        dialling.start_soon(_connect, transport, other)
        await trio.sleep(SETTLING_SECONDS)
        return median(len(gossip.neighbours()) for *_, gossip in self._members)

    async def announce(self, number: int) -> list[float]:
        """Let a random peer announce something; return after how long each peer heard it."""
        self.heard[number] = []
        identity, world, _, gossip = self._chance.choice(self._members)
        order = StepOrder(
            step=number,
            revision=0,
            checkpoint=CheckpointReference(lineage=0, step=0, digest=bytes(32), size_bytes=1),
            nonce=bytes(32),
            groups_wanted=1,
            submissions_max=1,
        )
        begun = trio.current_time()
        gossip.publish(
            seal(
                identity, order, run=RUN_ID, sequence=number,
                wall_time=world.wall_time(), lifetime_seconds=STATE_LIFETIME_SECONDS,
            )
        )  # fmt: skip
        await trio.sleep(HEARING_SECONDS)
        return [time - begun for time in self.heard[number]]


def measure_gossip(
    peers: int, seed: int = 1, *, announcements: int = 20, loss: float = 0.05
) -> dict[str, Any]:
    """Measure how many peers receive each announcement in time, when, and at what cost."""

    async def main() -> dict[str, Any]:
        network = SimulatedNetwork(seed, Weather(loss=loss))
        members = _Members(network)
        async with network.running(), trio.open_nursery() as nursery:
            for number in range(peers):
                await nursery.start(members.live, f"peer-{number}")
            neighbours = await members.connect()
            messages, sent = network.messages, network.bytes_sent
            delays = [await members.announce(number + 1) for number in range(announcements)]
            messages, sent = network.messages - messages, network.bytes_sent - sent
            nursery.cancel_scope.cancel()
        return {
            "virtual_seconds": round(trio.current_time(), 1),
            "messages": network.messages,
            "neighbours_median": neighbours,
            "announcements": announcements,
            "heard_by_everybody": sum(len(each) == peers for each in delays),
            "coverage": sum(map(len, delays)) / (peers * announcements),
            "delay_seconds": summary(delay for each in delays for delay in each),
            "messages_per_peer_and_announcement": round(messages / peers / announcements, 1),
            "bytes_per_peer_and_announcement": round(sent / peers / announcements, 1),
        }

    return run_virtual(main, seed=seed)


async def _connect(transport: SimulatedTransport, other: SimulatedTransport) -> None:
    """Dial until it succeeds: with packet loss, some dials take too long."""
    for _ in range(10):
        try:
            await transport.connect(other.peer_id, other.addresses())
            return
        except PeerError:
            await trio.sleep(1.0)
