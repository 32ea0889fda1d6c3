"""A crowd without admission that holds every gossip slot it can get: the run keeps its pace."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest
import trio

from simnet.adversaries.base import second_identity
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware
from simnet.simulation import Peer, Plan, Simulation
from swarm.errors import PeerError
from swarm.events import Event
from swarm.gossip.topics import PROTOCOL, RUN, WORK, Hello, encode
from swarm.node.run_node import RunNode
from swarm.transport import Stream, Transport
from swarm.wire.identity import Identity, PeerId
from tests.simnet.runs import SMALL, going

CROWD = 40
HOSTS = 8
STEADY_SECONDS = 120.0


class SlotHolder:
    """One machine with eight addresses and a crowd of identities, each of which begins to gossip
    with every peer it hears of, tells nothing, and begins again when it is sent away."""

    topics: ClassVar[tuple[str, ...]] = (RUN, WORK)

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer

    async def run(self) -> None:
        node = self._peer.node
        async with trio.open_nursery() as nursery:
            for number in range(CROWD):
                identity = Identity(node.world.secret_bytes(32))
                host = f"66.{number % HOSTS}.1.{number + 2}"
                nursery.start_soon(self._live, identity, host)

    async def _live(self, identity: Identity, host: str) -> None:
        async with second_identity(self._peer, identity, host) as (transport, nursery):
            transport.serve(PROTOCOL, self._hold)
            while True:
                for peer, addresses in self._victims():
                    nursery.start_soon(self._crowd_in, transport, peer, addresses)
                await trio.sleep(10)

    def _victims(self) -> list[tuple[PeerId, list[str]]]:
        records = [
            record for record in self._peer.node.records() if record.sender != self._peer.peer_id
        ]
        return [(PeerId(r.sender), cast(Any, r.message).addresses) for r in records]

    async def _crowd_in(self, transport: Transport, peer: PeerId, addresses: list[str]) -> None:
        try:
            await transport.connect(peer, addresses)
            await self._hold(await transport.open_stream(peer, PROTOCOL))
        except PeerError:
            return  # sent away: it tries again

    async def _hold(self, stream: Stream) -> None:
        wall_ms = int(self._peer.node.world.wall_time() * 1000)
        await stream.send(encode(Hello(self._peer.run.id, wall_ms, [RUN, WORK], [])))
        while await stream.receive() is not None:
            pass


def steps_made(*, crowded: bool) -> tuple[int, int]:
    """Steps of the watched time, and the most crowd in any honest peer's slots."""
    simulation = Simulation(3, workload=SMALL)
    trained: list[float] = []
    most = 0

    def hear(now: float, _peer: Peer, event: Event) -> None:
        if event.name == "trainer.step_trained":
            trained.append(now)

    async def main() -> None:
        nonlocal most
        simulation.listeners.append(hear)
        # The crowd is there first, but for its one member that is admitted.
        there = [Plan("v0", ["validator"]), Plan("crowd", ["relay"], acts=SlotHolder)]
        async with going(
            simulation,
            *there[: 1 + crowded],
            trainers=["trainer"],
            validators=["v0", "v1"],
            groups_per_step=16,
            steps=10_000,
        ) as peers:
            await trio.sleep(30 * crowded)
            for plan in (
                Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=2.0)),
                Plan("v1", ["validator"]),
                Plan("relay", ["relay"]),
                *(Plan(f"w{number}", ["inference"]) for number in range(4)),
            ):
                await simulation.add(plan).start()
            await trio.sleep(60)
            begun = simulation.now()
            await trio.sleep(STEADY_SECONDS)
            known = {peer.id for peer in peers.values()}
            for peer in peers.values():
                if peer.part is not None and peer.plan.acts is None:
                    held = peer.part.gossip.neighbours()
                    most = max(most, sum(neighbour not in known for neighbour in held))
            trained[:] = [when for when in trained if when > begun]

    run_virtual(main, seed=3, limit_seconds=400)
    return len(trained), most


@pytest.mark.slow
def test_a_crowd_in_the_slots_does_not_slow_the_run_down() -> None:
    undisturbed, _ = steps_made(crowded=False)
    crowded, most = steps_made(crowded=True)
    assert 0 < most <= 8, "there was a crowd, and it got the strangers' share"
    assert crowded >= 0.9 * undisturbed > 10
