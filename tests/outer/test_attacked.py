"""What befalls trainers in the middle of a run: all that stay end with the same state."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import trio

from peers.outer.artifacts import Artifacts
from peers.outer.chain import Chain
from peers.outer.gathering import Gathering
from peers.outer.loop import OuterLoop
from peers.outer.presence import Presence
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware
from simnet.faults import AnyFault, ClockStep, Crash, FullDisk, befall
from simnet.scenarios.parts import SERVER, start_bootstrap
from simnet.scenarios.several_trainers import WORKLOAD, Agreement
from simnet.simulation import Plan, Simulation
from swarm.events import Event
from swarm.manifest import Outer, RunManifest
from swarm.observable import Observable
from tests.outer.records import contribution, record
from tests.simnet.test_versions import signed

NAMES = ["a", "b", "c"]
STEP_SECONDS = 20.0


class Said:
    """What the trainers of a simulation say."""

    def __init__(self, simulation: Simulation) -> None:
        self.events: list[tuple[str, Event]] = []
        simulation.listeners.append(lambda _, peer, event: self.events.append((peer.name, event)))

    def named(self, name: str, peer: str = "") -> list[dict[str, Any]]:
        return [e.fields for who, e in self.events if e.name == name and peer in ("", who)]


def outlast(
    meanwhile: Callable[[Simulation, RunManifest], Awaitable[object]],
    *,
    rounds: int = 4,
    stay: list[str] = NAMES,
    seconds: float = 600.0,
) -> Said:
    """Run three trainers while something happens; all that stay must end with one state."""

    async def main() -> Said:
        simulation = Simulation(1, workload=WORKLOAD)
        Agreement(simulation)
        said = Said(simulation)
        async with simulation.running():
            outer = Outer(rounds=rounds, grace_seconds=5.0, deadline_seconds=60.0)
            bootstrap = await start_bootstrap(
                simulation, trainers=NAMES, validators=NAMES[:1], outer=outer
            )
            for name in NAMES:
                hardware = Hardware(step_seconds=STEP_SECONDS)
                await simulation.add(Plan(name, ["replica"], SERVER, hardware)).start()
            done = simulation.expect("outer.run_complete", stay)
            manifest = bootstrap.plan.manifests[0].expect(RunManifest)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(meanwhile, simulation, manifest)
                await simulation.meet(done, seconds)
                nursery.cancel_scope.cancel()
        assert simulation.violations == []
        return said

    return run_virtual(main, seed=1, limit_seconds=2000.0)


FAULTS: dict[str, AnyFault] = {
    "all lose power at once": Crash(at=1.5 * STEP_SECONDS, seconds=5.0, peers=NAMES),
    "a full disk": FullDisk(at=3.2 * STEP_SECONDS, seconds=100.0, peers=["c"]),
    "a clock that jumps ahead": ClockStep(at=30.0, ahead_seconds=50.0, peers=["c"]),
    "a clock that jumps back": ClockStep(at=30.0, ahead_seconds=-50.0, peers=["c"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_all_trainers_end_with_one_state_in_spite_of(fault: str) -> None:
    said = outlast(lambda simulation, _: befall(simulation, [FAULTS[fault]]), rounds=10)
    assert len(said.named("outer.run_complete")) == 3


def test_a_trainer_that_the_owner_removes_counts_until_then() -> None:
    """Its contribution counts in a record that exists, and in none that is made afterwards."""
    identity = ""

    async def remove(simulation: Simulation, manifest: RunManifest) -> None:
        nonlocal identity
        identity = simulation.peers["c"].id
        await trio.sleep(2.5 * STEP_SECONDS)
        stay = [key for key in manifest.trainers if key.peer != identity]
        simulation.disturbed = 1  # a peer may end
        new = msgspec.structs.replace(manifest, version=2, trainers=stay)
        part = simulation.peers["a"].part
        assert part is not None
        part.gossip.publish(signed(simulation, new))
        await trio.sleep_forever()

    said = outlast(remove, stay=["a", "b"], rounds=5)
    merged = {each["round"]: each["trainers"] for each in said.named("outer.merged", "a")}
    assert [round for round, trainers in merged.items() if identity in trainers] == [1, 2]
    assert sorted(merged) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_who_comes_when_the_others_vanish_goes_on_alone_soon() -> None:
    """It knows a heavier chain, whose state nobody can give it any more."""

    async def vanish(simulation: Simulation, _: RunManifest) -> None:
        peers = simulation.peers
        await trio.sleep(10.0)
        await peers["c"].kill()
        await trio.sleep(3.2 * STEP_SECONDS)
        known = simulation.expect("outer.together", ["c"])
        await peers["c"].start(resume=True)
        assert await simulation.meet(known, 60.0)
        for name in "ab":
            await peers[name].kill()
        await trio.sleep_forever()

    said = outlast(vanish, stay=["c"], rounds=6, seconds=420.0)
    assert said.named("outer.behind", "c")


def test_what_a_killed_process_left_is_deleted() -> None:
    """Or each death in the wrong moment would cost the room of an inner state."""
    left: list[str] = []

    async def kill(simulation: Simulation, _: RunManifest) -> None:
        peer = simulation.peers["c"]
        await trio.sleep(1.5 * STEP_SECONDS)
        await peer.kill()
        for name in ("inner-99", "state-00"):
            await peer.disk.write(f"outer/{name}/notes", b"")
        await peer.start(resume=True)
        await trio.sleep(1.0 * STEP_SECONDS)
        left.extend(peer.disk.list("outer"))
        assert peer.part is not None and peer.part.store._pins, "its state may be deleted"
        await trio.sleep_forever()

    outlast(kill)
    assert left and not {"inner-99", "state-00"} & set(left)


def test_a_contribution_of_another_branch_counts_once_its_branch_is_followed() -> None:
    ours, theirs = record([contribution(0)]), record([contribution(1, tokens=50)], signer=1)
    chain = Chain(1)
    chain.add(ours)
    chain.add(theirs)
    late = contribution(1, theirs.digest, 1)

    async def main() -> None:
        simulation = Simulation(1, workload=WORKLOAD)
        said = Said(simulation)
        async with simulation.running():
            await start_bootstrap(simulation, trainers=NAMES, validators=NAMES[:1])
            peer = simulation.add(Plan("a", ["observer"], SERVER))
            await peer.start()
            await trio.sleep(30.0)  # it joins
            part = peer.part
            assert part is not None
            loop = OuterLoop(part, chain, Presence(part), Artifacts(part), Observable(None))
            gathering = Gathering(loop)
            for _ in range(2):
                assert not gathering._is_new(late.trainer, late, ours.digest)
            assert len(said.named("outer.contribution_refused")) == 1
            assert gathering._is_new(late.trainer, late, theirs.digest)

    run_virtual(main, seed=1, limit_seconds=1000.0)
