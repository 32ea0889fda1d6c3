"""A small run while all kinds of faults befall its peers; then it must be well again.

After the last fault, the trainer must publish new policies within a bound, every worker generate
with one of them, and the trusted peers hold each other's logs."""

from collections.abc import Mapping
from typing import Any

from simnet.adversaries import disguise
from simnet.clock import source
from simnet.compute.setting import Hardware, Workload
from simnet.faults import befall, check, draw
from simnet.scenarios.parts import SERVER, draw_line, start_bootstrap, start_over_time
from simnet.simulation import Plan, Simulation

PEERS = 9
PEERS_MIN = 8
WORKLOAD = Workload(model_bytes=500_000, completion_tokens_mean=64.0)
FAULTS_FROM_SECONDS = 25.0
FAULTS_UNTIL_SECONDS = 90.0
FAULTS = 8
WELL_SECONDS = 240.0
"""Time after the last fault within which the run must advance again."""

TRUSTED = ["trainer", "validator-0", "validator-1"]


def names(peers: int) -> list[str]:
    others = ["bootstrap", *TRUSTED, "relay-0"]
    return [*others, *(f"worker-{number}" for number in range(peers - len(others)))]


async def run(simulation: Simulation, peers: int) -> dict[str, Any]:
    return await be_well_again(simulation, names(peers), faults=FAULTS)


async def be_well_again(
    simulation: Simulation,
    everybody: list[str],
    *,
    faults: int,
    adversaries: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run the scenario, with some of the peers as adversaries (kind by name)."""
    adversaries = adversaries or {}
    honest = [name for name in everybody if name not in adversaries]
    schedule = simulation.faults
    if schedule is None:
        schedule = simulation.faults = draw(
            source(simulation.seed, "faults"),
            honest,
            start=FAULTS_FROM_SECONDS,
            end=FAULTS_UNTIL_SECONDS,
            count=faults,
        )
    check(schedule, everybody)
    await start_bootstrap(
        simulation,
        trainers=["trainer"],
        validators=["validator-0", "validator-1"],
        groups_per_step=16,
        max_new_tokens=256,
    )
    plans = _plans(simulation, everybody, adversaries)
    await start_over_time(simulation, [simulation.add(plan) for plan in plans], 10.0)
    await befall(simulation, schedule)

    healed = simulation.now()
    policy = simulation.trace.counts["trainer.checkpoint_published"]
    workers = [
        name
        for name, peer in simulation.peers.items()
        if name.startswith("worker") and not peer.left and peer.plan.acts is None
    ]
    published = simulation.expect("trainer.checkpoint_published", ["trainer"])
    loaded = simulation.expect("inference.policy_loaded", workers)
    await simulation.meet(published, WELL_SECONDS)
    await simulation.meet(loaded, WELL_SECONDS)
    return {
        "faults": len(schedule),
        **({"adversaries": ", ".join(adversaries.values())} if adversaries else {}),
        "policies_before": policy,
        "policies": simulation.trace.counts["trainer.checkpoint_published"],
        "verdicts": simulation.trace.counts["validator.verdict"],
        "evictions": simulation.evictions(),
        "well_after_seconds": round(max(loaded.times.values(), default=healed) - healed, 3),
    }


def _plans(
    simulation: Simulation, everybody: list[str], adversaries: Mapping[str, str]
) -> list[Plan]:
    quick = Hardware(tokens_per_second=1000.0, step_seconds=12.0)
    saving = {"save_steps": source(simulation.seed, "states").choice((1, 5))}
    plans = [
        Plan("trainer", ["trainer"], SERVER, quick, tables={"trainer": saving}),
        Plan("validator-0", ["validator"], SERVER, quick),
        Plan("validator-1", ["validator"], SERVER, quick),
        Plan("relay-0", ["relay"], SERVER),
    ]
    plans += [
        Plan(name, ["inference"], draw_line(simulation.random), quick) for name in everybody[5:]
    ]
    return [
        disguise(plan, adversaries[plan.name]) if plan.name in adversaries else plan
        for plan in plans
    ]
