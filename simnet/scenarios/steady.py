"""A whole run going on as usual: heartbeats, gossip, submissions, lookups, republishing.

Each worker hands in a submission per minute, the trainer takes a step every five (INTELLECT-2 took
22), and each peer looks another one up as often. `benchmarks.simulator steady` measures the
cost."""

from typing import Any

import trio

from simnet.compute.setting import Hardware, Workload
from simnet.scenarios import parts
from simnet.simulation import Peer, Plan, Simulation
from swarm.errors import PeerError
from swarm.kademlia.publishing import REPUBLISH_SECONDS
from swarm.run.records import peer_key

PEERS = 100
WORKLOAD = Workload(model_bytes=1_000_000, completion_tokens_mean=1024.0)
WORKER = Hardware(tokens_per_second=512.0)
"""A worker's machine: 32 completions of 1024 tokens take a minute."""
CHECKER = Hardware(prefill_tokens_per_second=200_000.0)
"""A validator's machine with several GPUs. It checks six submissions a second; 250 workers make
4."""
PEERS_PER_VALIDATOR = 250
"""Each holds a connection to every peer it admits, of `CONNECTIONS_MAX`."""
ADMITTED_SECONDS = 90.0
SETTLING_SECONDS = 240.0
"""Time for newcomers to fill their far buckets: one lookup each in half a minute."""
STEADY_SECONDS = 300.0
"""Duration of the measurement: about a step."""
LOOKUP_SECONDS = 300.0
"""Mean time between two lookups of one peer."""
REPUBLISH_SECONDS = 1.25 * REPUBLISH_SECONDS


async def run(simulation: Simulation, peers: int) -> dict[str, Any]:
    validators = [f"validator-{number}" for number in range(max(2, peers // PEERS_PER_VALIDATOR))]
    relays = max(1, peers // 20)
    workers = max(2, peers - 2 - len(validators) - relays)
    await parts.start_bootstrap(
        simulation, trainers=["trainer"], validators=validators, steps=100_000,
        groups_per_step=20 * workers,
    )  # fmt: skip
    trusted = [
        simulation.add(Plan(name, ["validator"], parts.SERVER, CHECKER)) for name in validators
    ]
    trusted.append(simulation.add(Plan("trainer", ["trainer"], parts.SERVER)))
    for peer in trusted:
        await peer.start()
    members = [
        simulation.add(Plan(f"relay-{number}", ["relay"], parts.SERVER)) for number in range(relays)
    ]
    members += [
        simulation.add(
            Plan(f"worker-{number}", ["inference"], parts.draw_line(simulation.random), WORKER)
        )
        for number in range(workers)
    ]
    admitted = simulation.expect("membership.admitted", [peer.name for peer in members])
    await parts.start_over_time(simulation, members, max(30.0, peers / 20))
    await simulation.meet(admitted, ADMITTED_SECONDS)
    await trio.sleep(SETTLING_SECONDS)

    begun, counts = simulation.now(), simulation.trace.counts.copy()
    messages = simulation.network.messages
    found: list[float] = []
    lookups = 0
    async with trio.open_nursery() as nursery:
        for _ in range(round(STEADY_SECONDS)):
            for _ in range(_times(simulation, peers / LOOKUP_SECONDS)):
                lookups += 1
                nursery.start_soon(parts.look_up, simulation, members, found)
            for _ in range(_times(simulation, peers / REPUBLISH_SECONDS)):
                nursery.start_soon(_publish_again, simulation.random.choice(members))
            await trio.sleep(1.0)
    if len(found) < lookups:
        simulation.violate(f"{lookups - len(found)} of {lookups} peer records were not found")
    seconds = simulation.now() - begun
    happened = simulation.trace.counts - counts
    lost = happened["membership.lease_lost"]
    if lost:
        simulation.violate(f"{lost} leases were lost, though nothing failed")
    return {
        "admitted": len(admitted.times),
        "steady_from_seconds": begun,
        "steady_until_seconds": simulation.now(),
        "messages_per_second": (simulation.network.messages - messages) / seconds,
        "events_per_virtual_second": happened.total() / seconds,
        "lookups": lookups,
        "lookups_found": len(found),
        "lookup_seconds": parts.summary(found),
        "submissions": happened["inference.submission_delivered"],
        "verdicts": happened["validator.verdict"],
        "steps": happened["trainer.step_trained"],
    }


def _times(simulation: Simulation, rate: float) -> int:
    """Draw the number of events in one second, `rate` on average."""
    return int(rate) + (simulation.random.random() < rate % 1.0)


async def _publish_again(peer: Peer) -> None:
    """Publish a peer's record again now, which a peer does itself once per interval."""
    assert peer.node is not None
    record = next(each for each in peer.node.records() if each.sender == peer.id)
    try:
        await peer.node.dht.put(peer_key(peer.id), record.raw)
    except PeerError as error:
        peer.node.events.emit("dht.publish_failed", reason=str(error))
