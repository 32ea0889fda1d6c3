"""Strangers of a scored run: what counts, what is refused, and what they may not do."""

from __future__ import annotations

from typing import Any

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware
from simnet.scenarios.parts import SERVER, start_bootstrap
from simnet.scenarios.several_trainers import WORKLOAD, Agreement
from simnet.simulation import Plan, Simulation
from swarm.run.run import Run
from swarm.wire.manifest import Outer
from tests.outer.records import contribution, record
from tests.outer.test_attacked import Said

NAMED = ["a", "b"]


def run_with(
    strangers: dict[str, str], rounds: int = 6, **outer: Any
) -> tuple[Said, dict[str, str]]:
    """Two trainers and these strangers, with what each fabricates; what they say, and their ids."""

    async def main() -> tuple[Said, dict[str, str]]:
        simulation = Simulation(1, workload=WORKLOAD)
        agreement, said = Agreement(simulation), Said(simulation)
        terms = Outer(
            rounds=rounds, admission="scored", grace_seconds=10.0, deadline_seconds=60.0, **outer
        )
        async with simulation.running():
            bootstrap = await start_bootstrap(
                simulation, trainers=NAMED, validators=NAMED[:1], outer=terms
            )
            for name, fabricates in {**dict.fromkeys(NAMED, ""), **strangers}.items():
                plan = Plan(name, ["replica"], SERVER, Hardware(step_seconds=20.0))
                plan.fabricates = fabricates
                await simulation.add(plan).start()
            honest = [*NAMED, *(name for name, fabricates in strangers.items() if not fabricates)]
            done = simulation.expect("outer.run_complete", honest)
            assert await simulation.meet(done, 900.0)
            run, closed = Run(bootstrap.plan.manifests[0]), record([contribution(0)]).message
            for name in strangers:
                assert run.permits(simulation.peers[name].id, closed) == "not_permitted"
        assert simulation.violations == []
        assert agreement.compared
        return said, {name: peer.id for name, peer in simulation.peers.items()}

    return run_virtual(main, seed=1, limit_seconds=2000.0)


def test_a_stranger_counts_by_its_record_and_noise_is_refused() -> None:
    said, ids = run_with({"good": "", "bad": "noise", "broken": "nan"})
    merged = {each["round"]: each["trainers"] for each in said.named("outer.merged", "a")}
    assert sorted(merged) == [1, 2, 3, 4, 5, 6]
    assert all({ids["a"], ids["b"]} <= set(trainers) for trainers in merged.values())
    counted = [round for round, trainers in merged.items() if ids["good"] in trainers]
    assert 6 in counted and 1 not in counted
    listed = {trainer for trainers in merged.values() for trainer in trainers}
    assert not listed & {ids["bad"], ids["broken"]}
    reasons = {each["trainer"]: each["reason"] for each in said.named("outer.contribution_refused")}
    assert "raises the loss" in reasons[ids["bad"]]
    assert reasons[ids["broken"]] == "it holds NaN"
    told = {each["reason"] for each in said.named("outer.offer_refused", "bad")}
    assert any("raises the loss" in reason for reason in told)
    assert said.named("outer.run_complete", "good")


def test_a_flood_of_keys_costs_a_bounded_number_of_fetches() -> None:
    """One in four of `strangers_max` is for peers without a record, however many they are."""
    flood = {f"key-{each}": "noise" for each in range(6)}
    said, ids = run_with({"good": "", **flood}, rounds=6, strangers_max=4)
    for name in NAMED:
        scored = [each for each in said.named("outer.contribution_refused", name)]
        assert 1 <= len(scored) <= 6, "one newcomer a round"
    merged = said.named("outer.merged", "a")
    assert not {ids[name] for name in flood} & {each for one in merged for each in one["trainers"]}
