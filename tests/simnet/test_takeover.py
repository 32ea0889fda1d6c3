"""A standby takes the trainer's place, and the trainer returns: invariants hold in every case."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import cast

import msgspec
import pytest
import trio

from peers.trainer.role import TrainerRole
from peers.trainer.takeover import ask_all_trusted, check_gone
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.disk import SimulatedDisk
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Peer, Plan, Simulation
from swarm.errors import UserError
from swarm.events import Event
from swarm.ledger.state import LedgerState
from swarm.look.onlooker import RunStatus
from swarm.run.manifest import manifest_in
from swarm.run.update import sign_manifest, sign_takeover
from swarm.wire.envelope import Envelope
from tests.attacks.hostile import state_of

RUNNER = partial(run_virtual, seed=1)

VALIDATORS = ["v0", "v1"]
TRUSTED = ["trainer", "standby", *VALIDATORS]
HAS_POLICY = "standby shardcast.checkpoint_complete"
PUBLISHED = "trainer.checkpoint_published"
LONG_SECONDS = 700.0
"""Longer than gossip repeats a message."""


class Scene:
    """A run with a trainer and a standby, and what they did."""

    def __init__(
        self,
        seed: int,
        workers: int,
        step_seconds: float = 1.0,
        standbys: Sequence[str] = ("standby",),
        steps: int = 100_000,
    ) -> None:
        self.steps = steps
        self.step_seconds = step_seconds
        self.standbys = standbys
        self.simulation = Simulation(
            seed, workload=Workload(model_bytes=500_000, completion_tokens_mean=64)
        )
        self.simulation.listeners.append(self.hear)
        self.workers = [f"w{number}" for number in range(workers)]
        self.heard: dict[str, list[dict[str, object]]] = {}
        self.changed = trio.Event()

    def hear(self, _now: float, peer: Peer, event: Event) -> None:
        self.heard.setdefault(f"{peer.name} {event.name}", []).append(event.fields)
        self.changed.set()
        self.changed = trio.Event()

    async def until(self, key: str, count: int = 1, seconds: float = 600) -> None:
        """Wait until a peer has had an event so many times."""
        with trio.fail_after(seconds):
            while len(self.heard.get(key, [])) < count:
                await self.changed.wait()

    async def start(self) -> None:
        await start_bootstrap(
            self.simulation, trainers=["trainer"], validators=VALIDATORS,
            standbys=self.standbys,
            steps=self.steps, groups_per_step=16, max_new_tokens=256,
        )  # fmt: skip
        learner = Hardware(step_seconds=self.step_seconds)
        checker = Hardware(prefill_tokens_per_second=1e6)
        plans = [
            *(Plan(name, ["validator"], hardware=checker) for name in VALIDATORS),
            *(Plan(name, ["trainer"], hardware=learner) for name in ("trainer", *self.standbys)),
            *(Plan(name, ["inference"], hardware=Hardware()) for name in self.workers),
            Plan("relay", ["relay"]),
        ]
        for plan in plans:
            peer = self.simulation.add(plan)
            await peer.start()

    @asynccontextmanager
    async def running(self, until: str = "", disturbed: int = 0) -> AsyncIterator[dict[str, Peer]]:
        """The scene after its start, and after an event; its peers. With `disturbed`, a peer that
        ends is no violation."""
        async with self.simulation.running():
            await self.start()
            self.simulation.disturbed = disturbed
            if until:
                await self.until(until)
            yield self.simulation.peers

    def takeover(self, by: str, of: str) -> Envelope:
        """Sign a takeover, and let a validator hear it."""
        part = self.simulation.peers["v0"].part
        assert part is not None
        signer, trainer = self.simulation.identity(by), self.simulation.identity(of)
        wall = part.node.world.wall_time()
        envelope = sign_takeover(signer, part.run.manifest_envelope, trainer.peer_id, wall)
        part.versions.hear(envelope)
        return envelope

    def check(self) -> None:
        """No invariant is violated; trainers that were replaced have stopped with a sentence."""
        found = self.simulation.violations
        assert found and all("ended: a standby has taken this trainer's" in each for each in found)

    def trained(self, name: str) -> int:
        """How many steps a peer has trained."""
        return len(self.heard.get(f"{name} trainer.step_trained", []))


def named(scene: Scene, name: str) -> list[str]:
    """The trainers that a peer knows."""
    part = scene.simulation.peers[name].part
    assert part is not None
    return part.run.manifest.trainer_ids()


async def test_a_standby_that_is_not_there_when_its_turn_comes_goes_on_when_it_is_started() -> None:
    scene = Scene(22, workers=2)

    async with scene.running(HAS_POLICY, disturbed=1) as peers:
        await peers["trainer"].kill()
        await peers["standby"].kill()
        scene.takeover("standby", "trainer")
        await trio.sleep(60)  # the bootstrap peer has heard of it
        await peers["standby"].start_again()
        await scene.until("standby trainer.step_trained", 3)
    assert not scene.simulation.violations


async def test_a_standby_holds_no_verdicts_until_it_trains() -> None:
    scene = Scene(3, workers=2)

    async with scene.running(HAS_POLICY):
        await scene.until("trainer trainer.step_trained", 5)
        collectors = {
            name: cast(TrainerRole, scene.simulation.peers[name].roles[0])._collector
            for name in ("trainer", "standby")
        }
        heard = {
            name: len(each.accepted.refusals.heard.value._heard)
            for name, each in collectors.items()
        }
        assert heard["trainer"] > 0 and heard["standby"] == 0
        standby = collectors["standby"]
        assert standby._send.statistics().current_buffer_used == 0
        assert standby.forecast.coming() == 0
    assert scene.simulation.violations == []


async def test_a_trainer_that_is_replaced_while_it_trains_stops() -> None:
    """Nobody follows both."""
    scene = Scene(5, workers=4)

    async with scene.running(HAS_POLICY):
        await scene.until("trainer trainer.step_trained", 9)
        scene.takeover("standby", "trainer")
        await scene.until("standby trainer.step_trained", 3)
        await scene.until("trainer standby.standing_by", seconds=900)
    scene.check()


@pytest.mark.parametrize("stands_by", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_a_trainer_that_takes_its_place_back_is_followed(stands_by: bool) -> None:
    """The standby has led the run to a later lineage, and is lost with its disk: the trainer goes
    on above that, which it may only read in the validators' copies of a log."""
    scene = Scene(11, workers=4)

    async with scene.running(HAS_POLICY, disturbed=1) as peers:
        await scene.until("trainer trainer.step_trained", 9)
        await peers["trainer"].crash()
        scene.takeover("standby", "trainer")
        await scene.until("standby trainer.step_trained", 3)
        await trio.sleep(3)  # the validators have copied its log
        await peers["standby"].crash()
        if stands_by:
            await peers["trainer"].start_again()
            await scene.until("trainer standby.standing_by")
            await trio.sleep(5)
        before = scene.trained("trainer")
        scene.takeover("trainer", "standby")
        await trio.sleep(5)
        await peers["trainer"].start_again()
        await scene.until("trainer trainer.step_trained", before + 3)
        published = scene.heard["trainer trainer.checkpoint_published"]
        assert {each["lineage"] for each in published} == {0, 32}
        assert ledger(scene).credits
    assert not scene.simulation.violations


@pytest.mark.parametrize(("name", "lineage"), [("standby", 32), ("second", 16)])
async def test_two_standbys_would_begin_different_lineages(name: str, lineage: int) -> None:
    """So two that take over on both sides of a partition sign no policy of the same lineage and
    step, and the one that prevails has the later lineage, which everybody follows."""
    scene = Scene(13, workers=2, standbys=("standby", "second"))

    async with scene.running(disturbed=1):
        await scene.until(f"{name} shardcast.checkpoint_complete")
        await scene.simulation.peers["trainer"].crash()
        scene.takeover(name, "trainer")
        await scene.until(f"{name} {PUBLISHED}")
        assert scene.heard[f"{name} {PUBLISHED}"][0]["lineage"] == lineage
    assert not scene.simulation.violations


@pytest.mark.slow
async def test_a_trainer_that_did_not_hear_that_it_was_replaced_begins_above_the_standby() -> None:
    """It trains behind a cut line, and the owner's next version puts it back meanwhile."""
    scene = Scene(12, workers=4)

    async with scene.running(HAS_POLICY, disturbed=1):
        network, peers = scene.simulation.network, scene.simulation.peers
        trainer, others = peers["trainer"], [p for n, p in peers.items() if n != "trainer"]
        part = peers["v0"].part
        assert part is not None
        before = part.run.manifest_envelope
        for other in others:
            network.cut(trainer.id, other.id)
        scene.takeover("standby", "trainer")
        await scene.until("standby trainer.step_trained", 3)
        owner = scene.simulation.identity("owner")
        assert owner.peer_id == before.sender
        later = msgspec.structs.replace(manifest_in(before), version=2)
        wall = part.node.world.wall_time()
        part.versions.hear(sign_manifest(owner, later, wall))
        await trio.sleep(LONG_SECONDS)
        for other in others:
            network.heal(trainer.id, other.id)
        done = len(scene.heard["trainer trainer.checkpoint_published"])
        await scene.until("trainer trainer.rolled_back")
        await scene.until("trainer trainer.checkpoint_published", done + 3)
        newest = scene.heard["trainer trainer.checkpoint_published"][-1]
        assert newest["lineage"] == 32
    assert not scene.simulation.violations


async def check(scene: Scene) -> None:
    """Check that the trainer is gone, as `swarm trainer takeover` does."""
    part = scene.simulation.peers["relay"].part
    assert part is not None
    status = RunStatus(part.run)
    answered = await ask_all_trusted(part.node, status)
    me = scene.simulation.identity("standby").peer_id
    check_gone(status, answered, scene.simulation.identity("trainer").peer_id, me)


async def test_a_trainer_must_be_gone_for_a_minute() -> None:
    scene = Scene(6, workers=0)

    async with scene.running("trainer trainer.step_opened") as peers:
        with pytest.raises(UserError, match=r"was heard 0 s ago; stop it first"):
            await check(scene)
        await trio.sleep(15)
        await peers["trainer"].kill()
        await trio.sleep(20)
        with pytest.raises(UserError, match=r"was heard \d\d s ago; stop it first"):
            await check(scene)
        await trio.sleep(65)
        await check(scene)
        for name in TRUSTED[1:]:
            await peers[name].kill()
        with pytest.raises(UserError, match=r"no other trusted peer of run .* answered within"):
            await check(scene)
        for name in VALIDATORS:
            await peers[name].start(resume=True)
        await trio.sleep(5)
        with pytest.raises(UserError, match="may have begun just now; use --force"):
            await check(scene)
    assert not scene.simulation.violations


def ledger(scene: Scene) -> LedgerState:
    """The run's state by the logs of all trusted peers, as they are on their disks."""
    return state_of(scene.simulation, TRUSTED, reader="v0")


@pytest.mark.parametrize("who", ["trainer", "standby", "late standby"])
async def test_where_every_state_is_lost_the_newest_policy_is_enough(who: str) -> None:
    """The trainer has its key and an empty disk, or a standby takes over that has just begun, or
    that begins when nobody announces a policy any more and gets a copy of another peer's folder."""
    scene = Scene(9, workers=4, step_seconds=4.0)

    async with scene.running() as peers:
        await peers["standby"].kill()
        peers["standby"].disk = SimulatedDisk("standby")
        await scene.until("trainer trainer.step_trained", 4)
        await trio.sleep(3)  # the validators have copied the log
        await peers["trainer"].crash()
        peers["trainer"].disk = SimulatedDisk("trainer")
        step = len(scene.heard[f"trainer {PUBLISHED}"]) - 1
        new = peers["trainer" if who == "trainer" else "standby"]
        if who == "standby":
            await new.start_again()
            await trio.sleep(30)
        else:
            if who == "late standby":
                scene.takeover("standby", "trainer")
            await (new.start() if who == "trainer" else new.start_again())
            await trio.sleep(60)
            assert not new.alive and WHY[who] in str(new.ended), new.ended
            disk = peers["v0"].disk
            for name in disk.files() if who == "late standby" else ():
                if name.startswith(f"checkpoints/0-{step}/"):
                    size = disk.size_bytes(name)
                    await new.disk.allocate(name, size)
                    sink = new.disk.sink(name, 0, size)
                    await disk.copy(name, 0, size, sink)
                    await sink.commit(sink.finish())
            if who == "late standby":  # nobody has signed a file beside them
                extra = f"checkpoints/0-{step}/adapter_model.safetensors"
                await new.disk.write(extra, b"")
                await new.start_again()
                await trio.sleep(60)
                assert not new.alive and "none that is here is sound" in str(new.ended)
                await new.disk.remove(extra)
            await new.start(resume=True)
        if who == "standby":
            scene.takeover("standby", "trainer")
        await scene.until(f"{new.name} trainer.step_trained", scene.trained(new.name) + 3)
        after = scene.heard[f"{new.name} {PUBLISHED}"]
        begun = [(each["lineage"], each["step"]) for each in after if each["lineage"]]
        assert begun[:3] == [(16, step), (16, step + 1), (16, step + 2)]
        assert who != "trainer" or ledger(scene).credits
    assert all(WHY[who] in each for each in scene.simulation.violations)


WHY = {
    "trainer": "has published policy 4 already, and this home has no training state",
    "standby": "nothing",
    "late standby": "announces a policy any more",
}


@pytest.mark.slow
async def test_20_peers_lose_their_trainer_for_good_while_others_crash() -> None:
    """Every credit and receipt of the old lineage stays, and the work goes on."""
    scene = Scene(8, workers=14, step_seconds=4.0)
    chance = Random(8)

    async with scene.running() as peers:
        assert len(peers) == 20
        await scene.until(HAS_POLICY)
        await scene.until("trainer trainer.step_trained", 2)
        await peers["trainer"].crash()
        before = ledger(scene)
        assert before.credits
        scene.takeover("standby", "trainer")
        await trio.sleep(0.5)
        victims = ["standby", "v0", "v1", "relay", *scene.workers]
        for name in ["standby", *chance.sample(victims, 6)]:
            await peers[name].crash()
            await trio.sleep(chance.uniform(0, 2))
            await peers[name].start_again()
        await scene.until("standby trainer.step_trained", 2)
        for name in VALIDATORS:
            assert named(scene, name) == [peers["standby"].id]
        after = ledger(scene)
        assert before.credits.items() <= after.credits.items()
        assert before.verdicts.items() <= after.verdicts.items()
        since = [each for key, each in after.verdicts.items() if key not in before.verdicts]
        assert {each.lineage for each in since if each.outcome == "accepted"} >= {16}
    assert not scene.simulation.violations
