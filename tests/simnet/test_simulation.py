"""Production peers in the simulator: they join, fetch, work, crash, come back; and it repeats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio
from typer.testing import CliRunner

from peers.observer import ObserverRole
from simnet.cli import command
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.lines import Line
from simnet.scenarios.parts import start_bootstrap
from simnet.simulate import simulate
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event

RUNNER = partial(run_virtual, seed=1)
KEYS = {
    "scenario", "peers", "seed", "virtual_seconds", "wall_seconds", "events", "trace_hash",
    "violations", "figures", "network", "led_there", "faults",
}  # fmt: skip
SMALL = Workload(model_bytes=3_000_000, completion_tokens_mean=64)


@asynccontextmanager
async def running(workload: Workload = SMALL) -> AsyncIterator[Simulation]:
    """A simulation that violates nothing."""
    simulation = Simulation(1, workload=workload)
    async with simulation.running():
        yield simulation
    assert simulation.violations == []


async def small_run(
    simulation: Simulation,
    *,
    workers: int = 2,
    steps: int = 4,
    relays: int = 0,
    hardware: Hardware | None = None,
    **run: Any,
) -> dict[str, Peer]:
    """A bootstrap peer, a trainer, two validators, relays and workers, all started."""
    await start_bootstrap(
        simulation, trainers=["trainer"], validators=["v0", "v1"], steps=steps,
        groups_per_step=8, max_new_tokens=256, **run,
    )  # fmt: skip
    hardware = hardware or Hardware()
    plans = [Plan(name, ["validator"], hardware=hardware) for name in ("v0", "v1")]
    plans += [
        Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=10.0))
    ]  # fmt: skip
    plans += [Plan(f"r{number}", ["relay"]) for number in range(relays)]
    plans += [
        Plan(f"w{number}", ["inference"], Line("asia-east"), hardware) for number in range(workers)
    ]
    peers = {}
    for plan in plans:
        peers[plan.name] = simulation.add(plan)
        await peers[plan.name].start()
    return peers


# --- the same again ---


def in_a_process(hash_seed: str, *names: str) -> list[dict[str, Any]]:
    """The reports of small runs of these scenarios."""
    program = (
        "import json, sys\n"
        f"ballast = [object() for _ in range({hash_seed}0001)]\n"  # other memory addresses
        "from simnet.simulate import simulate\n"
        "print(json.dumps([simulate(name, peers=10, seed=3, model_bytes=3_000_000)"
        " for name in sys.argv[1:]]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program, *names],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    reports: list[dict[str, Any]] = json.loads(output)
    return reports


def test_one_seed_is_one_trace_whatever_the_process() -> None:
    first, again = (in_a_process(hash_seed, "join", "broadcast") for hash_seed in ("1", "2"))
    for report in first:
        assert set(report) == KEYS
        assert report["violations"] == []
        assert report["events"] > 100
    for report in (*first, *again):
        del report["wall_seconds"]
    assert first == again


def test_another_seed_is_another_trace() -> None:
    first, second = (simulate("join", peers=10, seed=seed) for seed in (1, 2))
    assert first["trace_hash"] != second["trace_hash"]


# --- scenarios ---


def test_all_who_join_are_admitted_and_found() -> None:
    report = simulate("join", peers=12, seed=4)
    assert report["violations"] == []
    assert report["figures"]["admitted"] == 9
    assert report["figures"]["lookups_found"] == 1.0
    assert report["figures"]["seconds_to_admission"]["max"] < 30


def test_a_broadcast_ends_near_its_bound_and_work_begins() -> None:
    report = simulate("broadcast", peers=12, seed=4, model_bytes=20_000_000)
    assert report["violations"] == []
    figures = report["figures"]
    assert figures["pieces_received"] >= 10 * (20_000_000 // 262_144)
    # Nothing beats the bound; so small a checkpoint is mostly round trips to far regions.
    bound = figures["bound_seconds"]
    assert bound < figures["fetch_seconds"]["max"] < bound + 5.0
    assert figures["first_submission_seconds"] > 0


async def test_no_broadcast_is_an_expectation_not_met() -> None:
    simulation = Simulation(1)
    async with simulation.running():
        waited = simulation.expect("shardcast.checkpoint_complete", ["nobody", "no one"])
        assert not await simulation.meet(waited, 5.0)

    assert simulation.violations == [
        "at 5.000 s: 2 peers (nobody, no one) did not come to shardcast.checkpoint_complete "
        "within 5 s"
    ]


# --- whole runs ---


async def test_a_whole_run_is_trained_to_its_end() -> None:
    async with running() as simulation:
        over = simulation.expect("trainer.run_complete", ["trainer"])
        left = simulation.expect("inference.run_over", ["w0", "w1"])
        await small_run(simulation)
        await simulation.meet(over, 600)
        await simulation.meet(left, 60)
    assert simulation.trace.counts["trainer.step_trained"] == 4
    assert simulation.trace.counts["trainer.checkpoint_published"] == 5
    assert simulation.trace.counts["membership.peer_evicted"] == 0


async def test_a_second_fault_may_strike_a_peer_while_it_starts_again() -> None:
    async with running() as simulation:
        worker = (await small_run(simulation))["w0"]
        await worker.crash()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.start_again)
            await trio.testing.wait_all_tasks_blocked()
            assert worker.alive and worker.node is None
            await worker.crash()
        assert not worker.alive
        await worker.start_again()
        assert worker.alive


async def test_who_loses_power_comes_back_from_the_disk() -> None:
    """The trainer in the middle of a step, and a worker: the run still reaches its end, and no
    submission is trained on twice."""
    async with running() as simulation:
        over = simulation.expect("trainer.run_complete", ["trainer"])
        second = simulation.expect(
            "trainer.step_trained", ["trainer"], lambda event: event.fields["step"] == 1
        )
        peers = await small_run(simulation)
        await simulation.meet(second, 300)
        await trio.sleep(3)
        await peers["trainer"].crash()
        await peers["w0"].crash()
        assert not peers["trainer"].alive
        await trio.sleep(20)
        assert simulation.trace.last(["trainer"])[-1][0] <= simulation.now() - 20
        await peers["trainer"].start(resume=True)
        await peers["w0"].start()
        await simulation.meet(over, 900)
    assert simulation.trace.counts["trainer.resumed"] == 1
    assert simulation.trace.counts["trainer.run_complete"] == 1


async def test_a_policy_that_memory_cannot_hold_is_not_fetched() -> None:
    """Twice its size is needed, since one policy takes the place of another; a relay needs none."""
    small = Hardware(memory_bytes=2 * SMALL.model_bytes - 1)
    received: list[str] = []

    async with running() as simulation:
        simulation.listeners.append(
            lambda _, peer, event: received.extend(
                [peer.name] * (event.name == "shardcast.piece_received")
            )
        )
        complete = simulation.expect("shardcast.checkpoint_complete", ["relaying"])
        await small_run(simulation, workers=1)
        for name, role in (("cramped", "inference"), ("relaying", "relay")):
            plan = Plan(name, [role], hardware=small, acts=simulation.role(role))
            await simulation.add(plan).start()  # `acts`: so that its end is expected
        await simulation.meet(complete, 60)
        await trio.sleep(10)
    said = simulation.peers["cramped"].ended or ""
    assert "have 3.0 MB, and 2 must fit into memory at a time, but only 6.0 MB are free" in said
    assert "relaying" in received and "cramped" not in received


class Brief(ObserverRole):
    async def run(self) -> None:
        """Return at once, as a role of somebody's may."""


async def test_roles_that_return_early_end_their_peer_and_not_the_run() -> None:
    async with running() as simulation:
        await small_run(simulation, workers=0)
        ended = simulation.expect("peer.roles_ended", ["brief"])
        await simulation.add(Plan("brief", ["observer"], acts=Brief)).start()
        assert await simulation.meet(ended, 60)


async def test_whoever_is_evicted_while_his_work_is_judged_is_refused() -> None:
    verdicts: list[Mapping[str, Any]] = []

    async with running() as simulation:

        def hear(_now: float, peer: Peer, event: Event) -> None:
            if event.name == "validator.verdict":
                verdicts.append(event.fields)

        simulation.listeners.append(hear)
        delivered = simulation.expect("inference.submission_delivered", ["w0"])
        peers = await small_run(
            simulation, workers=1, hardware=Hardware(prefill_tokens_per_second=100.0)
        )
        await simulation.meet(delivered, 300)
        await trio.sleep(2)
        assert not verdicts
        # He does not hear of it, or he would leave.
        for name in set(simulation.peers) - {"w0"}:
            simulation.network.cut(simulation.peers[name].id, peers["w0"].id)
        for name in ("v0", "v1"):
            await peers[name].roles[0]._trusted.evict(peers["w0"].id, "for a test", b"", 1.0, 0.0)  # type: ignore[attr-defined]
        await trio.sleep(60)
    assert verdicts
    for said in verdicts:
        assert (said["outcome"], said["failed"]) == ("refused", "admission")
        assert said["detail"] == "its worker was evicted: for a test"


# --- the command line ---


def test_the_scenarios_are_listed_with_what_they_are() -> None:
    result = CliRunner().invoke(command, ["list"])
    assert result.exit_code == 0
    for name in ("join", "broadcast"):
        assert f"{name} " in result.output
    assert "one bootstrap peer" in result.output


def test_the_report_is_written_as_json(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = CliRunner().invoke(
        command, ["run", "join", "--peers", "10", "--seed", "1", "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert set(report) == KEYS
    assert report["trace_hash"] in result.output
