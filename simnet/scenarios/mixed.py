"""A small run while all kinds of faults befall its peers; then it must be well again.

The schedule is drawn from the seed, or read from `--faults FILE`. When the last fault is over, the
trainer must publish policies again within a bound, every worker must have work accepted, and the
trusted peers must hold each other's logs.
"""

from __future__ import annotations

from typing import Any

from simnet.compute import Hardware, Workload
from simnet.faults import befall, check, draw
from simnet.scenarios.parts import SERVER, draw_line, start_bootstrap, start_over_time
from simnet.seeded import source
from simnet.simulation import Plan, Simulation

PEERS = 9
PEERS_MIN = 8
WORKLOAD = Workload(model_bytes=500_000, completion_tokens_mean=64.0)
FAULTS_FROM_SECONDS = 40.0
FAULTS_UNTIL_SECONDS = 160.0
FAULTS = 8
WELL_SECONDS = 240.0
"""After the last fault, until the run has advanced again."""

TRUSTED = ["trainer", "validator-0", "validator-1"]


def names(peers: int) -> list[str]:
    """Who takes part, the bootstrap peer first."""
    others = ["bootstrap", *TRUSTED, "relay-0"]
    return [*others, *(f"worker-{number}" for number in range(peers - len(others)))]


async def run(simulation: Simulation, peers: int) -> dict[str, Any]:
    everybody = names(peers)
    schedule = simulation.faults
    if schedule is None:
        schedule = simulation.faults = draw(
            source(simulation.seed, "faults"),
            everybody,
            start=FAULTS_FROM_SECONDS,
            end=FAULTS_UNTIL_SECONDS,
            count=FAULTS,
        )
    check(schedule, everybody)
    await start_bootstrap(
        simulation,
        trainers=["trainer"],
        validators=["validator-0", "validator-1"],
        groups_per_step=16,
        max_new_tokens=256,
    )
    quick = Hardware(tokens_per_second=1000.0, step_seconds=15.0)
    plans = [
        Plan("trainer", ["trainer"], SERVER, quick, options={"trainer.model": "simulated"}),
        Plan("validator-0", ["validator"], SERVER, quick),
        Plan("validator-1", ["validator"], SERVER, quick),
        Plan("relay-0", ["relay"], SERVER),
    ]
    plans += [
        Plan(name, ["inference"], draw_line(simulation.random), quick) for name in everybody[5:]
    ]
    await start_over_time(simulation, [simulation.add(plan) for plan in plans], 10.0)
    await befall(simulation, schedule)

    healed = simulation.now()
    policy = simulation.trace.counts["trainer.checkpoint_published"]
    workers = [
        name
        for name, peer in simulation.peers.items()
        if name.startswith("worker") and not peer.left
    ]
    published = simulation.expect("trainer.checkpoint_published", ["trainer"])
    accepted = simulation.expect(
        "inference.receipt", workers, lambda event: event.fields["outcome"] == "accepted"
    )
    await simulation.meet(published, WELL_SECONDS)
    await simulation.meet(accepted, WELL_SECONDS)
    return {
        "faults": len(schedule),
        "policies_before": policy,
        "policies": simulation.trace.counts["trainer.checkpoint_published"],
        "verdicts": simulation.trace.counts["validator.verdict"],
        "well_after_seconds": round(max(accepted.times.values(), default=healed) - healed, 3),
    }
