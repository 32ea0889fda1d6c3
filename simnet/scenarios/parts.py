"""Helpers shared by scenarios: drawing lines, starting peers, summarising times."""

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import trio

from simnet.lines import REGIONS, Line
from simnet.simulation import Peer, Plan, Simulation
from swarm.errors import PeerError
from swarm.run.records import peer_key

LINES = ((12.5e6, 12.5e6, 3), (31.25e6, 125e6, 3), (125e6, 125e6, 3), (1.25e9, 1.25e9, 1))
"""(uplink, downlink in bytes per second, weight): 100 Mb/s, cable, 1 Gb/s, 10 Gb/s."""

SERVER = Line("us-east", 1.25e9, 1.25e9)
"""The line of a server: 10 Gb/s."""


def draw_line(chance: Random) -> Line:
    up, down, _ = chance.choices(LINES, [weight for _, _, weight in LINES])[0]
    return Line(chance.choice(REGIONS), up, down)


async def start_bootstrap(
    simulation: Simulation, *, trainers: Sequence[str], validators: Sequence[str], **run: Any
) -> Peer:
    """Start a bootstrap peer that hands out the run's manifest; later peers bootstrap from it."""
    manifest = simulation.manifest(trainers=trainers, validators=validators, **run)
    bootstrap = simulation.add(Plan("bootstrap", ["bootstrap"], SERVER, manifests=[manifest]))
    node = await bootstrap.start()
    simulation.bootstrap += node.transport.addresses()
    return bootstrap


async def start_over_time(
    simulation: Simulation, peers: Sequence[Peer], seconds: float, chance: Random | None = None
) -> None:
    """Start peers at random times within `seconds`; return when the last one listens."""
    chance = chance or simulation.random
    moments = sorted((chance.uniform(0, seconds), peer.name) for peer in peers)
    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        for moment, name in moments:
            await trio.sleep_until(begun + moment)
            nursery.start_soon(simulation.peers[name].start)


async def look_up(simulation: Simulation, members: Sequence[Peer], found: list[float]) -> None:
    """Let a random peer look another one up in the DHT; add the seconds if it is found."""
    asking, wanted = simulation.random.choice(members), simulation.random.choice(members)
    assert asking.node is not None
    begun = trio.current_time()
    try:
        if await asking.node.dht.get(peer_key(wanted.id)) is not None:
            found.append(trio.current_time() - begun)
    except PeerError:
        return  # counted as not found


def summary(seconds: Iterable[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum of some times, in seconds to the millisecond."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {
        "median": round(ordered[len(ordered) // 2], 3),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 3),
        "max": round(ordered[-1], 3),
    }
