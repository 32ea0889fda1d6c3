"""The trainer publishes a checkpoint and every inference peer fetches it.

The bound is the least time of any broadcast: one copy over the slowest downlink, one over the
trainer's uplink, and all copies over all uplinks together."""

from typing import Any

from simnet.compute.setting import Workload
from simnet.scenarios.parts import SERVER, draw_line, start_bootstrap, start_over_time, summary
from simnet.simulation import Plan, Simulation

PEERS = 30
WORKLOAD = Workload(model_bytes=100_000_000)
ARRIVAL_SECONDS = 20.0
ADMITTED_SECONDS = 60.0
SLACK = 20.0
"""A fetch may take this many times the bound before it counts as stuck."""


async def run(simulation: Simulation, peers: int) -> dict[str, Any]:
    validators = ["validator-0", "validator-1"]
    await start_bootstrap(simulation, trainers=["trainer"], validators=validators)
    plans = [Plan(name, ["validator"], SERVER) for name in validators]
    plans += [Plan(f"relay-{number}", ["relay"], SERVER) for number in range(4)]
    plans += [
        Plan(f"worker-{number}", ["inference"], draw_line(simulation.random))
        for number in range(peers - 2 - len(plans))
    ]
    fetchers = [simulation.add(plan) for plan in plans]
    members = [peer.name for peer in fetchers if peer.name not in validators]
    admitted = simulation.expect("membership.admitted", members)
    await start_over_time(simulation, fetchers, ARRIVAL_SECONDS)
    await simulation.meet(admitted, ADMITTED_SECONDS)

    names = [peer.name for peer in fetchers]
    published = simulation.expect("trainer.checkpoint_published", ["trainer"])
    complete = simulation.expect("shardcast.checkpoint_complete", names)
    submitted = simulation.expect(
        "inference.submission_delivered", [name for name in names if name.startswith("worker")]
    )
    await simulation.add(Plan("trainer", ["trainer"], SERVER)).start()
    await simulation.meet(published, 600.0)
    lines = [plan.line for plan in plans]
    uplinks = sum(line.uplink_bytes_per_second for line in [SERVER, *lines])
    bound = simulation.workload.model_bytes * max(
        1 / SERVER.uplink_bytes_per_second,
        1 / min(line.downlink_bytes_per_second for line in lines),
        len(lines) / uplinks,
    )
    await simulation.meet(complete, SLACK * bound + 60.0)
    begun = published.times.get("trainer", 0.0)
    times = {name: at - begun for name, at in complete.times.items()}
    await simulation.meet(submitted, SLACK * bound + 600.0)
    return {
        "checkpoint_bytes": simulation.workload.model_bytes,
        "bound_seconds": round(bound, 3),
        "fetch_seconds": summary(times.values()),
        "times_the_bound": round(max(times.values(), default=0.0) / bound, 2),
        "first_submission_seconds": round(min(submitted.times.values(), default=0.0) - begun, 3),
        "pieces_received": simulation.trace.counts["shardcast.piece_received"],
        "control_messages": simulation.network.messages,
    }
