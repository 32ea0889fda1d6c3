"""Many peers join a run through one bootstrap peer, and find each other in the DHT.

One trusted peer per 500 peers, and at least two, admit relays that join from anywhere within half a
minute or at twenty per second."""

from typing import Any

import trio

from simnet.scenarios import parts
from simnet.simulation import Plan, Simulation

PEERS = 50
PEERS_PER_TRUSTED = 500
"""Each holds a connection to every peer it admits, of `CONNECTIONS_MAX`."""
ARRIVAL_SECONDS_MIN = 30.0
ARRIVALS_PER_SECOND_MAX = 20.0
ADMITTED_SECONDS = 90.0
"""Time within which the last peer must be admitted, once all peers have started."""
SETTLING_SECONDS = 30.0
LOOKUPS = 50


async def run(simulation: Simulation, peers: int) -> dict[str, Any]:
    trusted = ["trainer"]
    trusted += [f"validator-{number}" for number in range(max(1, peers // PEERS_PER_TRUSTED))]
    await parts.start_bootstrap(simulation, trainers=trusted[:1], validators=trusted[1:])
    for name in trusted:
        await simulation.add(Plan(name, ["observer"], parts.SERVER)).start()
    joiners = [
        simulation.add(Plan(f"peer-{number}", ["relay"], parts.draw_line(simulation.random)))
        for number in range(peers - 1 - len(trusted))
    ]
    everyone = [peer.name for peer in joiners]
    listening = simulation.expect("peer.listening", everyone)
    admitted = simulation.expect("membership.admitted", everyone)
    await parts.start_over_time(
        simulation, joiners, max(ARRIVAL_SECONDS_MIN, peers / ARRIVALS_PER_SECOND_MAX)
    )
    await simulation.meet(listening, 1.0)
    await simulation.meet(admitted, ADMITTED_SECONDS)
    await trio.sleep(SETTLING_SECONDS)
    found: list[float] = []
    for _ in range(LOOKUPS):
        await parts.look_up(simulation, joiners, found)
    if len(found) < LOOKUPS:
        simulation.violate(f"{LOOKUPS - len(found)} of {LOOKUPS} peer records were not found")
    return {
        "admitted": len(admitted.times),
        "seconds_to_admission": parts.summary(
            at - listening.times[name] for name, at in admitted.times.items()
        ),
        "lookups_found": len(found) / LOOKUPS,
        "lookup_seconds": parts.summary(found),
        "control_messages": simulation.network.messages,
        "control_messages_per_peer": round(simulation.network.messages / peers, 1),
    }
