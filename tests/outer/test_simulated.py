"""Several trainers in the simulator: newcomers, deaths and partitions end in one state."""

from __future__ import annotations

import pytest

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware
from simnet.scenarios.parts import SERVER, start_bootstrap
from simnet.scenarios.several_trainers import WORKLOAD, Agreement
from simnet.simulate import simulate
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.wire.manifest import Outer


@pytest.mark.slow
@pytest.mark.parametrize("peers", [2, 6])
def test_trainers_that_lose_each_other_end_in_one_state(peers: int) -> None:
    """Some begin late; one dies once; then a third does not hear the others for two rounds."""
    report = simulate("several-trainers", peers=peers, seed=1)
    assert report["violations"] == []
    figures = report["figures"]
    assert figures["run_complete"] == peers
    assert figures["branch_lost"] >= 1  # by the partition
    assert figures["states_compared"] >= peers
    assert figures["joined_seconds"]["max"] > 0


def test_contributions_that_cannot_be_merged_are_left_out_by_everyone() -> None:
    """Of three trainers one writes NaN and one too many bytes; the third goes on alone."""
    refused: set[tuple[str, str]] = set()

    async def main() -> None:
        simulation = Simulation(1, workload=WORKLOAD)
        agreement = Agreement(simulation)
        names = ["good", "nan", "large"]

        def hear(_: float, peer: Peer, event: Event) -> None:
            if event.name == "outer.contribution_refused":
                refused.add((peer.name, event.fields["reason"]))

        simulation.listeners.append(hear)
        async with simulation.running():
            outer = Outer(rounds=1, grace_seconds=5.0, deadline_seconds=20.0)
            await start_bootstrap(simulation, trainers=names, validators=names[:1], outer=outer)
            for name in names:
                plan = Plan(name, ["replica"], SERVER, Hardware(step_seconds=20.0))
                plan.fabricates = "" if name == "good" else name
                await simulation.add(plan).start()
            done = simulation.expect("outer.run_complete", names)
            await simulation.meet(done, 200.0)
        assert simulation.violations == []
        assert agreement.events["outer.merged"] == 3

    run_virtual(main, seed=1, limit_seconds=1000.0)
    too_large = "bytes; a contribution to this model can have 1 to 1004096"
    assert ("good", "it holds NaN") in refused
    assert any(peer == "good" and reason.endswith(too_large) for peer, reason in refused)


def test_a_replica_that_waits_for_others_shows_no_rate() -> None:
    rates: dict[float, float] = {}

    async def main() -> None:
        simulation = Simulation(1, workload=WORKLOAD)
        names = ["quick", "slow"]

        def hear(now: float, peer: Peer, event: Event) -> None:
            if (peer.name, event.name) == ("quick", "peer.status"):
                rates[now] = event.fields["tokens_per_second"]

        simulation.listeners.append(hear)
        async with simulation.running():
            outer = Outer(rounds=1, grace_seconds=150.0, deadline_seconds=160.0)
            await start_bootstrap(simulation, trainers=names, validators=names[:1], outer=outer)
            for name, seconds in zip(names, (5.0, 120.0), strict=True):
                plan = Plan(name, ["replica"], SERVER, Hardware(step_seconds=seconds))
                await simulation.add(plan).start()
            done = simulation.expect("outer.run_complete", names)
            await simulation.meet(done, 300.0)

    run_virtual(main, seed=1, limit_seconds=1000.0)
    assert max(rates.values()) > 0
    assert rates[max(rates)] == 0.0, "what it did once is not what it does"
