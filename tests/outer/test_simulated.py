"""Several trainers in the simulator: newcomers, deaths and partitions end in one state."""

from __future__ import annotations

from itertools import pairwise

import pytest

from peers.outer.sharing import TAKEOVER_SECONDS
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.scenarios.parts import SERVER, start_bootstrap
from simnet.scenarios.several_trainers import WORKLOAD, Agreement
from simnet.simulate import simulate
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.wire.manifest import SHARDS_MAX, Outer


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


@pytest.mark.slow
def test_a_line_that_drops_to_1_megabit_costs_the_others_only_the_grace_window() -> None:
    """Of four trainers that merge in shards; what the slow one sends late counts a round later."""
    names, slow, grace = ["a", "b", "c", "slow"], "slow", 10.0
    merged: list[Event] = []
    times: list[float] = []

    async def main() -> None:
        simulation = Simulation(1, workload=Workload(model_bytes=2_000_000))
        Agreement(simulation)

        def hear(now: float, peer: Peer, event: Event) -> None:
            if peer.name == "a" and event.name == "outer.merged":
                merged.append(event)
                times.append(now)

        simulation.listeners.append(hear)
        async with simulation.running():
            outer = Outer(rounds=6, grace_seconds=grace, deadline_seconds=120.0, shards=4)
            await start_bootstrap(simulation, trainers=names, validators=names[:1], outer=outer)
            for name in names:
                plan = Plan(name, ["replica"], SERVER, Hardware(step_seconds=20.0))
                await simulation.add(plan).start()
            first = simulation.expect("outer.merged", names)
            done = simulation.expect("outer.run_complete", names[:3])
            await simulation.meet(first, 100.0)
            simulation.network.narrow(simulation.peers[slow].id, 1e6 / 8)
            await simulation.meet(done, 600.0)
        assert simulation.violations == []
        own = simulation.identity(slow).peer_id
        counts = [own in event.fields["trainers"] for event in merged]
        assert counts[0] and any(counts[1:]), counts
        # The next in line merges its shard, twice where the first record cannot be merged.
        most = 20.0 + grace + 4 * TAKEOVER_SECONDS
        assert max(b - a for a, b in pairwise(times)) < most, times

    run_virtual(main, seed=1, limit_seconds=2000.0)


def test_each_part_of_a_contribution_is_fetched_once() -> None:
    """Also by one who still writes a state that the others hold: their shards do not fall to it."""
    names, rounds, size = ["a", "b", "c", "slow"], 3, 4_000_000
    received = 0

    async def main() -> None:
        simulation = Simulation(1, workload=Workload(model_bytes=size))
        Agreement(simulation)

        def hear(_: float, peer: Peer, event: Event) -> None:
            nonlocal received
            if event.name == "shardcast.piece_received" and event.fields["piece"] >= 0:
                received += event.fields["bytes"]

        simulation.listeners.append(hear)
        async with simulation.running():
            outer = Outer(rounds=rounds, shards=len(names), audit_share=0.0)
            await start_bootstrap(simulation, trainers=names, validators=names[:1], outer=outer)
            for name in names:
                plan = Plan(name, ["replica"], SERVER, Hardware(step_seconds=20.0))
                peer = simulation.add(plan)
                if name == "slow":
                    peer.disk.bytes_per_second = 4e6
                await peer.start()
            done = simulation.expect("outer.run_complete", names)
            await simulation.meet(done, 600.0)
        assert simulation.violations == []

    run_virtual(main, seed=1, limit_seconds=1000.0)
    # Of each contribution every shard once, and of the means of the round all but the own one.
    expected = rounds * size * (len(names) + len(names) - 1)
    assert expected <= received < 1.02 * expected


def test_a_round_is_merged_in_as_many_shards_as_a_run_may_have() -> None:
    """Each has a header: together they are larger than one."""

    async def main() -> None:
        simulation = Simulation(1, workload=WORKLOAD)
        agreement = Agreement(simulation)
        names = ["a", "b"]
        async with simulation.running():
            outer = Outer(rounds=1, shards=SHARDS_MAX)
            await start_bootstrap(simulation, trainers=names, validators=names[:1], outer=outer)
            for name in names:
                plan = Plan(name, ["replica"], SERVER, Hardware(step_seconds=20.0))
                await simulation.add(plan).start()
            done = simulation.expect("outer.run_complete", names)
            await simulation.meet(done, 300.0)
        assert simulation.violations == []
        assert not agreement.events["outer.contribution_refused"]

    run_virtual(main, seed=1, limit_seconds=1000.0)


@pytest.mark.parametrize("peers", [2, 6, pytest.param(30, marks=pytest.mark.long)])
def test_trainers_with_one_seed_do_the_same(peers: int) -> None:
    first, again = (simulate("several-trainers", peers=peers, seed=3) for _ in range(2))
    assert first["violations"] == []
    assert first["trace_hash"] == again["trace_hash"]
