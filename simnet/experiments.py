"""Experiments with one protocol alone: production's DHT or gossip on the simulated network.

Without roles, disks and ledgers a peer costs little, so that experiments with a thousand peers take
minutes. `benchmarks.simulator` prints the figures; the tests use fewer peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import trio

from simnet.clock import run_virtual
from simnet.disk import SimulatedDisk
from simnet.lines import Weather
from simnet.network import SimulatedNetwork
from simnet.scenarios.parts import draw_line, summary
from simnet.seeded import derive, source
from simnet.transport import SimulatedTransport
from simnet.world import EPOCH, SimulatedWorld
from swarm.envelope import STATE_LIFETIME_SECONDS, Gate, seal
from swarm.errors import PeerError
from swarm.events import Events
from swarm.gossip.gossip import Gossip
from swarm.gossip.slots import NEIGHBOURS_WANTED
from swarm.gossip.topics import RUN
from swarm.identity import Identity, PeerId
from swarm.kademlia.dht import Kademlia
from swarm.kademlia.publishing import REPUBLISH_SECONDS
from swarm.kademlia.records import RecordInfo
from swarm.messages import CheckpointReference, StepOrder

ARRIVALS_PER_SECOND = 20.0
SETTLING_SECONDS = 60.0


class _AnyValue:
    """Accepts every record, for a day: the experiment does not measure signatures."""

    def validate(self, key: bytes, value: bytes) -> RecordInfo:
        return RecordInfo(version=1, expires_wall_ms=int((EPOCH + 86400) * 1000))


@dataclass
class _DhtPeer:
    id: PeerId
    address: str
    dht: Kademlia
    scope: trio.CancelScope


class _Dht:
    """Peers that only serve and query the DHT."""

    def __init__(self, seed: int, weather: Weather, nursery: trio.Nursery) -> None:
        self.network = SimulatedNetwork(seed, weather)
        self.peers: list[_DhtPeer] = []
        self.hops: list[int] = []
        """Hops of each record lookup."""
        self.random = source(seed, "experiment")
        self._seed = seed
        self._nursery = nursery
        self._made = 0

    async def start(self) -> _DhtPeer:
        """Start one more peer; return once it has joined."""
        self._made += 1
        name = f"peer-{self._made}"
        peer: _DhtPeer = await self._nursery.start(self._live, name, name=name)
        if self.peers:
            # Newcomers bootstrap from the first peers, which stay.
            await peer.dht.bootstrap([self.peers[0].address])
        self.peers.append(peer)
        return peer

    async def _live(self, name: str, *, task_status: trio.TaskStatus[_DhtPeer]) -> None:
        world = SimulatedWorld(self._seed, name)
        identity = Identity(derive(self._seed, "key", name))
        with trio.CancelScope() as scope:
            async with self.network.transport(
                identity,
                world=world,
                disk=SimulatedDisk(name),
                line=draw_line(source(self._seed, "line", name)),
            ) as transport:
                dht = Kademlia(transport, world, {"swarm-peer": _AnyValue()}, emit=self._hear)
                peer = _DhtPeer(identity.peer_id, transport.addresses()[0], dht, scope)
                async with trio.open_nursery() as nursery:
                    await nursery.start(dht.run)
                    task_status.started(peer)

    def _hear(self, name: str, /, **fields: Any) -> None:
        if name == "dht.lookup_finished" and fields["kind"] == "GET_VALUE":
            self.hops.append(fields["hops"])

    def stop(self, peer: _DhtPeer, *, power: bool) -> None:
        """Stop a peer without notice: its process dies, or with `power` its machine."""
        self.peers.remove(peer)
        if power:
            self.network.cut_power(peer.id)
        peer.scope.cancel()

    async def found(self, keys: Sequence[bytes], lookups: int, seconds: float) -> float:
        """Share of `lookups` that find a record, from random peers, spread over `seconds`."""
        successes = 0

        async def look_up() -> None:
            nonlocal successes
            asking = self.random.choice(self.peers)
            try:
                found = await asking.dht.get(self.random.choice(keys)) is not None
            except PeerError:
                found = False
            # A lookup does not count as failed if its peer leaves meanwhile.
            successes += found or asking.scope.cancel_called

        async with trio.open_nursery() as nursery:
            for _ in range(lookups):
                nursery.start_soon(look_up)
                await trio.sleep(seconds / lookups)
        return successes / lookups


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
        async with trio.open_nursery() as nursery:
            dht = _Dht(seed, Weather(), nursery)
            async with dht.network.running():
                figures = await _ask_dht(dht)
                nursery.cancel_scope.cancel()
        return figures

    async def _ask_dht(dht: _Dht) -> dict[str, Any]:
        await dht.start()
        async with trio.open_nursery() as nursery:
            for _ in range(peers - 1):
                nursery.start_soon(dht.start)
                await trio.sleep(1 / ARRIVALS_PER_SECOND)
        await trio.sleep(SETTLING_SECONDS)
        joined = dht.network.messages
        keys = [b"/swarm-peer/record-%d" % number for number in range(records)]
        for key in keys:
            await dht.random.choice(dht.peers).dht.put(key, b"value of " + key)
        dht.hops.clear()
        calm = await dht.found(keys, lookups, 120.0)
        hops = list(dht.hops)
        replaced = round(0.2 * peers * churn_seconds / 600.0)
        churned = 0.0

        async def look_up() -> None:
            nonlocal churned
            churned = await dht.found(keys, lookups, churn_seconds)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look_up)
            for number in range(replaced):
                await trio.sleep(churn_seconds / replaced)
                dht.stop(dht.random.choice(dht.peers[1:]), power=bool(number % 2))
                nursery.start_soon(dht.start)
        left = len(dht.peers) // 2
        for number in range(left):
            await trio.sleep(REPUBLISH_SECONDS / left)
            dht.stop(dht.random.choice(dht.peers[1:]), power=bool(number % 2))
        survivors = [await dht.random.choice(dht.peers).dht.get(key) for key in keys]
        return {
            "virtual_seconds": round(trio.current_time(), 1),
            "messages": dht.network.messages,
            "messages_per_peer_joining": round(joined / peers, 1),
            "lookups_found": calm,
            "lookups_found_in_churn": churned,
            "records_after_half_left": sum(value is not None for value in survivors) / records,
            "hops_median": median(hops),
            "hops_max": max(hops),
            "contacts_median": median(len(peer.dht.table) for peer in dht.peers),
        }

    return run_virtual(main, seed=seed)


RUN_ID = "experiment"


def measure_gossip(
    peers: int, seed: int = 1, *, announcements: int = 20, loss: float = 0.05
) -> dict[str, Any]:
    """Measure how many peers receive each announcement within 30 s, when, and at what cost."""

    async def main() -> dict[str, Any]:
        network = SimulatedNetwork(seed, Weather(loss=loss))
        chance = source(seed, "experiment")
        heard: dict[int, list[float]] = {}
        members: list[tuple[SimulatedTransport, Gossip, SimulatedWorld, Identity]] = []

        async def live(name: str, *, task_status: trio.TaskStatus[None]) -> None:
            world = SimulatedWorld(seed, name)
            identity = Identity(derive(seed, "key", name))
            async with network.transport(
                identity, world=world, disk=SimulatedDisk(name), line=draw_line(chance)
            ) as transport:
                gossip = Gossip(
                    transport,
                    world,
                    Gate(world, RUN_ID, lambda sender, message: None, lambda sender: False),
                    Events(world, identity.peer_id),
                    RUN_ID,
                    [RUN],
                    records=list,
                    learn_record=lambda record: None,
                    admits=lambda peer, shown: True,
                )
                gossip.listen(
                    StepOrder,
                    lambda envelope: heard[envelope.body.sequence].append(trio.current_time()),
                )
                members.append((transport, gossip, world, identity))
                async with trio.open_nursery() as nursery:
                    await nursery.start(gossip.run)
                    task_status.started()

        async with network.running(), trio.open_nursery() as nursery:
            for number in range(peers):
                await nursery.start(live, f"peer-{number}")
            async with trio.open_nursery() as dialling:
                for transport, *_ in members:
                    others = [m[0] for m in chance.sample(members, NEIGHBOURS_WANTED)]
                    for other in others:
                        if other is not transport:
                            dialling.start_soon(_connect, transport, other)
            await trio.sleep(SETTLING_SECONDS)
            neighbours = median(len(member[1].neighbours()) for member in members)
            before = (network.messages, network.bytes_sent)
            delays: list[float] = []
            complete = 0
            for number in range(1, announcements + 1):
                heard[number] = []
                _, gossip, world, identity = chance.choice(members)
                order = StepOrder(
                    step=number,
                    revision=0,
                    checkpoint=CheckpointReference(
                        lineage=0, step=0, digest=bytes(32), size_bytes=1
                    ),
                    nonce=bytes(32),
                    groups_wanted=1,
                    submissions_max=1,
                )
                begun = trio.current_time()
                gossip.publish(
                    seal(
                        identity,
                        order,
                        run=RUN_ID,
                        sequence=number,
                        wall_time=world.wall_time(),
                        lifetime_seconds=STATE_LIFETIME_SECONDS,
                    )
                )
                await trio.sleep(30.0)
                delays += [time - begun for time in heard[number]]
                complete += len(heard[number]) == peers
            messages = network.messages - before[0]
            sent = network.bytes_sent - before[1]
            nursery.cancel_scope.cancel()
        return {
            "virtual_seconds": round(trio.current_time(), 1),
            "messages": network.messages,
            "neighbours_median": neighbours,
            "announcements": announcements,
            "heard_by_everybody": complete,
            "coverage": len(delays) / (peers * announcements),
            "delay_seconds": summary(delays),
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
