"""A crowd without admission that holds every gossip slot it can get: the run keeps its pace."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest
import trio

from simnet.adversaries.base import second_identity
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Peer, Plan, Simulation
from swarm.errors import PeerError
from swarm.events import Event
from swarm.gossip.topics import PROTOCOL, RUN, WORK, Hello, encode
from swarm.node.run_node import RunNode
from swarm.transport import Stream, Transport
from swarm.wire.identity import Identity, PeerId

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
    simulation = Simulation(3, workload=Workload(model_bytes=500_000, completion_tokens_mean=64))
    trained: list[float] = []
    most = 0

    def hear(now: float, _peer: Peer, event: Event) -> None:
        if event.name == "trainer.step_trained":
            trained.append(now)

    async def main() -> int:
        nonlocal most
        simulation.listeners.append(hear)
        async with simulation.running():
            await start_bootstrap(
                simulation, trainers=["trainer"], validators=["v0", "v1"], groups_per_step=16,
                steps=10_000, max_new_tokens=256,
            )  # fmt: skip
            if crowded:  # it is there first, but for its one member that is admitted
                await simulation.add(Plan("v0", ["validator"])).start()
                await simulation.add(Plan("crowd", ["relay"], acts=SlotHolder)).start()
                await trio.sleep(30)
            else:
                await simulation.add(Plan("v0", ["validator"])).start()
            hardware = Hardware(step_seconds=2.0)
            plans = [
                Plan("trainer", ["trainer"], hardware=hardware),
                Plan("v1", ["validator"]),
                Plan("relay", ["relay"]),
                *(Plan(f"w{number}", ["inference"]) for number in range(4)),
            ]
            for plan in plans:
                await simulation.add(plan).start()
            await trio.sleep(60)
            begun = simulation.now()
            await trio.sleep(STEADY_SECONDS)
            honest = [peer for peer in simulation.peers.values() if peer.plan.acts is None]
            known = {peer.id for peer in simulation.peers.values()}
            for peer in honest:
                if peer.part is not None:
                    held = peer.part.gossip.neighbours()
                    most = max(most, sum(neighbour not in known for neighbour in held))
            return sum(when > begun for when in trained)

    made = 0

    async def counted() -> None:
        nonlocal made
        made = await main()

    run_virtual(counted, seed=3, limit_seconds=400)
    assert simulation.violations == []
    return made, most


@pytest.mark.slow
def test_a_crowd_in_the_slots_does_not_slow_the_run_down() -> None:
    undisturbed, _ = steps_made(crowded=False)
    crowded, most = steps_made(crowded=True)
    assert 0 < most <= 8, "there was a crowd, and it got the strangers' share"
    assert crowded >= 0.9 * undisturbed > 10
