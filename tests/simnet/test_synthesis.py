"""A simulated swarm makes a data set of 5,000 tasks of four kinds, as SYNTHETIC-1 was made."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
import pytest

from peers.synthesis.write import Credit, Rules, Selection, Solution, credit_lines, summary
from peers.trainer.accepted import KEPT
from simnet.adversaries import disguise
from simnet.compute.rollouts import SimulatedRollouts
from simnet.compute.setting import Hardware, Workload
from simnet.scenarios import Scenario
from simnet.scenarios.parts import SERVER, draw_line, start_bootstrap, start_over_time
from simnet.simulate import simulate
from simnet.simulation import SIMULATED, Peer, Plan, Simulation
from swarm.rollouts.seeds import environment_of_group, task_seed
from swarm.wire.envelope import open_envelope
from swarm.wire.manifest import Objective
from swarm.wire.messages import Verdict

KINDS = ("verifiable_math", "verifiable_code", "code_output_prediction", "stackexchange")
WORKERS, TASKS, SOLUTIONS, STEPS = 21, 5_000, 2, 4
MACHINE = Hardware(tokens_per_second=512.0, step_seconds=1.0)
WORKLOAD = Workload(completion_tokens_mean=512.0, reward_start=0.6, reward_gain=0.0)
RULES = Rules((1.0, 1.0), (1, 1 << 20), unfinished=False, per_task=SOLUTIONS, similarity=0.8)


async def make_data_set(simulation: Simulation, peers: int) -> dict[str, Any]:
    """The production peers generate and judge; the rules of `swarm synthesize` choose."""
    await start_bootstrap(
        simulation,
        trainers=["trainer"],
        validators=["validator-0", "validator-1"],
        steps=STEPS,
        groups_per_step=TASKS // STEPS,
        group_size=SOLUTIONS,
        groups_per_submission=25,
        environments=[msgspec.structs.replace(SIMULATED, name=kind) for kind in KINDS],
        objective=Objective(name="synthesis"),
    )
    plans = [Plan(f"validator-{n}", ["validator"], SERVER) for n in range(2)]
    plans += [
        Plan(f"worker-{n}", ["inference"], draw_line(simulation.random), MACHINE)
        for n in range(WORKERS)
    ]
    plans[-1] = disguise(plans[-1], "wrong-weights")
    trainer = simulation.add(Plan("trainer", ["trainer"], SERVER, MACHINE))
    complete = simulation.expect("trainer.run_complete", ["trainer"])
    await start_over_time(simulation, [trainer, *map(simulation.add, plans)], 30.0)
    await simulation.meet(complete, 24 * 3600.0)
    solutions = await solutions_of(trainer)
    selection = Selection(RULES)
    list(selection.of(solutions))
    names: dict[str, str] = {peer.id: peer.name for peer in simulation.peers.values()}
    print("\n".join([summary(selection), *credit_lines(selection.kinds)]))
    print("\n".join(credit_lines({names[key]: own for key, own in selection.credits.items()})))
    return {
        "tasks": len({each.task for each in solutions}),
        "evictions": simulation.evictions(),
        "workers": {names[peer]: asdict(own) for peer, own in selection.credits.items()},
        "kinds": {kind: asdict(own) for kind, own in selection.kinds.items()},
    }


async def solutions_of(trainer: Peer) -> list[Solution]:
    """What the trainer's home holds: its files, with the verdicts on them."""
    found = []
    rows = trainer.disk.database("trainer.sqlite").read("SELECT digest, verdict FROM kept")
    for digest, raw in sorted(rows):
        verdict = open_envelope(raw).message
        assert isinstance(verdict, Verdict)
        file = await trainer.disk.read(f"{KEPT}/{digest.hex()}.rollouts")
        made = msgspec.msgpack.decode(file, type=SimulatedRollouts)
        found += [
            Solution(
                task=task_seed(made.seed, group),
                prompt=task_seed(made.seed, group).hex(),
                text=f"{sample} {tokens}",
                tokens=tokens,
                reward=verdict.rewards[group][sample],
                finished=True,
                kind=KINDS[environment_of_group(made.seed, group, [1.0] * len(KINDS))],
                contributor=verdict.worker,
                row={},
            )
            for group, lengths in enumerate(made.lengths)
            for sample, tokens in enumerate(lengths)
        ]
    return found


@pytest.mark.slow
def test_a_swarm_makes_a_data_set_with_credits() -> None:
    report = simulate(Scenario("synthesis", "", WORKERS + 4, 0, make_data_set, WORKLOAD))
    print(f"{report['wall_seconds']} s for {report['virtual_seconds']} virtual seconds")
    figures = report["figures"]
    assert report["violations"] == [] and figures["tasks"] >= TASKS
    totals = []
    for credits in (figures["workers"], figures["kinds"]):
        own = [Credit(**each) for each in credits.values()]
        totals.append((sum(each.solutions for each in own), sum(each.kept for each in own)))
        assert all(0.4 < each.kept / each.solutions < 0.8 for each in own)
    assert totals[0] == totals[1] and totals[0][0] == SOLUTIONS * figures["tasks"]
    assert set(figures["kinds"]) == set(KINDS)
    # The one that fakes its solutions is evicted and credited with nothing.
    assert figures["evictions"] == 1
    assert set(figures["workers"]) == {f"worker-{n}" for n in range(WORKERS - 1)}
