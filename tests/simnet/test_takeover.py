"""A standby takes the trainer's place, and the trainer returns: invariants hold in every case."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, cast

import msgspec
import pytest
import trio

from peers.trainer.role import TrainerRole
from peers.trainer.standby import offering
from peers.trainer.standby.bundle import Contents
from peers.trainer.standby.following import CONTENTS
from peers.trainer.takeover import (
    GONE_SECONDS,
    LISTENING_SECONDS,
    ask_all_trusted,
    last_sign_of_life,
)
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.disk import SimulatedDisk
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Peer, Plan, Simulation
from swarm.errors import UserError
from swarm.events import Event
from swarm.ledger.entries import decode
from swarm.ledger.log import Log
from swarm.ledger.state import Authority, LedgerState, Record, ledger_state
from swarm.look.onlooker import RunStatus
from swarm.run.manifest import manifest_in
from swarm.run.update import sign_manifest, sign_takeover
from swarm.sentences import sentence
from swarm.wire.envelope import Envelope
from swarm.wire.identity import Identity, PeerId, sealed_for

VALIDATORS = ["v0", "v1"]
TRUSTED = ["trainer", "standby", *VALIDATORS]
BUNDLE = "standby standby.bundle_received"
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
        standby_minutes: float = 0.1,
        steps: int = 100_000,
    ) -> None:
        self.steps = steps
        self.step_seconds = step_seconds
        self.standbys = standbys
        self.tables = {"trainer": {"standby_minutes": standby_minutes}}
        self.simulation = Simulation(
            seed, workload=Workload(model_bytes=500_000, completion_tokens_mean=64)
        )
        self.simulation.listeners.append(self.hear)
        self.workers = [f"w{number}" for number in range(workers)]
        self.heard: dict[str, list[dict[str, object]]] = {}
        self.changed = trio.Event()
        self.disks: dict[str, SimulatedDisk] = {}
        """Disks that peers have in place of their own, by peer."""

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
            *(
                Plan(name, ["trainer"], hardware=learner, tables=self.tables)
                for name in ("trainer", *self.standbys)
            ),
            *(Plan(name, ["inference"], hardware=Hardware()) for name in self.workers),
            Plan("relay", ["relay"]),
        ]
        for plan in plans:
            peer = self.simulation.add(plan)
            peer.disk = self.disks.get(plan.name, peer.disk)
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
        part.hear_manifest(envelope)
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


@pytest.mark.parametrize("after_seconds", [2.0, pytest.param(23.9, marks=pytest.mark.slow)])
def test_the_standby_goes_on_and_the_trainer_stands_by_when_it_returns(
    after_seconds: float,
) -> None:
    scene = Scene(int(after_seconds * 10), workers=4)

    async def main() -> None:
        async with scene.running(BUNDLE):
            await trio.sleep(after_seconds)
            peers = scene.simulation.peers
            await peers["trainer"].kill()
            await trio.sleep(5)
            scene.takeover("standby", "trainer")
            await scene.until("standby trainer.step_trained", 3)
            await peers["trainer"].start(resume=True)
            await scene.until("trainer standby.bundle_received")
            for name in ("v0", "v1", "w0", "trainer"):
                assert named(scene, name) == [peers["standby"].id]
            scene.takeover("trainer", "standby")
            await scene.until("trainer trainer.step_trained", scene.trained("trainer") + 3)

    run_virtual(main, seed=1, limit_seconds=3600)
    scene.check()


@pytest.mark.parametrize("power", [True, False], ids=["power cut", "killed"])
def test_a_standby_that_stops_as_a_bundle_becomes_whole_has_one_that_it_can_open(
    power: bool,
) -> None:
    scene = Scene(21, workers=2)
    whole = trio.Event()

    def stop(_now: float, peer: Peer, event: Event) -> None:
        is_whole = (peer.name, event.name) == ("standby", "shardcast.checkpoint_complete")
        if is_whole and not whole.is_set() and scene.heard.get("standby standby.bundle_received"):
            peer.disk.lose_power()  # before another byte is written
            whole.set()

    async def main() -> None:
        async with scene.running():
            scene.simulation.listeners.append(stop)
            await whole.wait()
            peers = scene.simulation.peers
            await peers["trainer"].kill()
            await (peers["standby"].crash() if power else peers["standby"].kill())
            scene.heard.clear()
            await peers["standby"].start_again()
            await scene.until("standby standby.standing_by")
            held = scene.heard["standby standby.standing_by"][0]
            assert bool(held["step"]) != power

    run_virtual(main, seed=1, limit_seconds=600)
    assert not scene.simulation.violations


@pytest.mark.parametrize("moment", ["unpacking", "down"])
def test_a_standby_that_is_not_there_when_its_turn_comes_goes_on_from_its_bundle(
    moment: str,
) -> None:
    """It is stopped while it unpacks, or hears only at its next start that it is the trainer."""
    scene = Scene(22, workers=2)

    async def main() -> None:
        async with scene.running(BUNDLE, disturbed=1) as peers:
            standby = peers["standby"]
            await peers["trainer"].kill()
            if moment == "down":
                await standby.kill()
                scene.takeover("standby", "trainer")
                await trio.sleep(60)  # the bootstrap peer has heard of it
            else:
                standby.disk.bytes_per_second = 50.0
                scene.takeover("standby", "trainer")
                with trio.fail_after(60):
                    while "inherited.new" not in "".join(standby.disk.files()):  # noqa: ASYNC110
                        await trio.sleep(0.01)
                await standby.kill()
                standby.disk.bytes_per_second = 1e9
            await standby.start_again()
            await scene.until("standby trainer.step_trained", 3)
            assert not [name for name in standby.disk.files() if name.startswith("standby/")]
            await peers["trainer"].start(resume=True)
            await scene.until("trainer standby.bundle_received")
            left = [name for name in peers["trainer"].disk.files() if name.startswith("bundles/")]
            assert not left, "a bundle that the trainer made is of no use to the standby it is now"

    run_virtual(main, seed=1, limit_seconds=600)
    assert not scene.simulation.violations


@pytest.mark.parametrize(
    "lie", ["missing file", "another size", "huge", "twice", "other key", "older"]
)
def test_a_bundle_that_does_not_fit_its_contents_takes_no_place(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standby keeps the one it has, and says why."""
    scene = Scene(23, workers=2)
    stranger = Identity(bytes(32)).peer_id

    def lying(peer: PeerId, raw: bytes) -> bytes:
        contents = msgspec.msgpack.decode(raw, type=Contents)
        if contents.step == 0:
            return sealed_for(peer, raw)
        (file,) = contents.files
        more = msgspec.structs.replace(file, name="more")
        files = {
            "missing file": [
                msgspec.structs.replace(file, size_bytes=file.size_bytes - 17),
                msgspec.structs.replace(more, size_bytes=1),
            ],
            "another size": [msgspec.structs.replace(file, size_bytes=file.size_bytes + 1)],
            "huge": [msgspec.structs.replace(file, size_bytes=2**53)],
            "twice": [file, file],
        }.get(lie, [file])
        step = 0 if lie == "older" else contents.step
        changed = msgspec.structs.replace(contents, files=files, step=step)
        return sealed_for(stranger if lie == "other key" else peer, msgspec.msgpack.encode(changed))

    monkeypatch.setattr(offering, "sealed_for", lying)

    async def main() -> None:
        async with scene.running():
            await scene.until("standby standby.no_bundle", 2)
            (received,) = scene.heard["standby standby.bundle_received"]
            assert received["step"] == 0
            reason = str(scene.heard["standby standby.no_bundle"][-1]["reason"])
            assert WHY[lie] in reason, reason
            await scene.simulation.peers["trainer"].kill()
            scene.takeover("standby", "trainer")
            await scene.until("standby trainer.step_trained", 3)

    run_virtual(main, seed=1, limit_seconds=600)
    assert not scene.simulation.violations


WHY = {
    "missing file": "are not those of its contents",
    "another size": "and its contents list",
    "huge": "its contents list 9,007,336,693,694,464",
    "twice": "list state twice",
    "other key": "are not sealed to this peer's key",
    "older": "belong to different states",
}


def test_a_bundle_that_was_damaged_on_the_disk_ends_the_standby_with_the_way_out() -> None:
    scene = Scene(24, workers=0)

    async def main() -> None:
        async with scene.running(BUNDLE, disturbed=1) as peers:
            await peers["trainer"].kill()
            disk = peers["standby"].disk
            for name in [name for name in disk.files() if name.endswith("/0000")]:
                raw = bytearray(await disk.read(name))
                raw[0] ^= 1
                await disk.write(name, bytes(raw))
            scene.takeover("standby", "trainer")
            await trio.sleep(3)
            ended = str(peers["standby"].ended)
            assert "damaged" in ended and "remove the folder standby in this home" in ended, ended

    run_virtual(main, seed=1, limit_seconds=600)


class FailingDisk(SimulatedDisk):
    """Cannot read what a bundle is made of, once."""

    fails = False

    async def sha256(self, path: str) -> bytes:
        if self.fails and path.startswith(offering.MAKING):
            self.fails = False
            raise OSError(errno.EIO, "Input/output error")
        return await super().sha256(path)


def test_a_bundle_that_could_not_be_made_is_made_again_and_not_offered() -> None:
    """One of the same state, for fewer standbys: it would have replaced the one before."""
    scene = Scene(27, workers=0, standbys=("standby", "second"))
    scene.disks["trainer"] = disk = FailingDisk("trainer")

    async def main() -> None:
        async with scene.running() as peers:
            for name in scene.standbys:
                await scene.until(f"{name} standby.bundle_received")
                await peers[name].kill()
            peers["standby"].disk = SimulatedDisk("standby")
            part = peers["trainer"].part
            assert part is not None
            held = manifest_in(part.run.manifest_envelope)
            fewer = msgspec.structs.replace(held, version=2, standbys=held.standbys[:1])
            owner, wall = scene.simulation.identity("owner"), part.node.world.wall_time()
            for name in ("trainer", *VALIDATORS):
                other = peers[name].part
                assert other is not None
                other.hear_manifest(sign_manifest(owner, fewer, wall))
            disk.fails = True
            await peers["standby"].start()
            await scene.until("trainer trainer.bundle_not_offered")
            assert not disk.exists(offering.MAKING)
            await scene.until("standby standby.bundle_received", 2, seconds=30)

    run_virtual(main, seed=1, limit_seconds=600)


def test_a_bundle_for_another_key_is_not_deleted_and_the_way_out_is_said() -> None:
    """It may be the only copy of the state, and the key may come back."""
    scene = Scene(28, workers=0)

    async def main() -> None:
        async with scene.running(BUNDLE, disturbed=1):
            standby = scene.simulation.peers["standby"]
            await standby.kill()
            (name,) = [name for name in standby.disk.files() if name.endswith(CONTENTS)]
            mine = await standby.disk.read(name)
            await standby.disk.write(name, sealed_for(Identity(bytes(32)).peer_id, b"of another"))
            await standby.start_again()
            await trio.sleep(3)
            ended = str(standby.ended)
            assert "not sealed to this peer's key; put the identity.key back" in ended, ended
            await standby.disk.write(name, mine)
            await standby.start_again()
            await scene.until("standby standby.standing_by", 2)

    run_virtual(main, seed=1, limit_seconds=600)


@pytest.mark.slow
def test_offers_that_cannot_be_taken_do_not_fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time the trainer is started it offers another one."""
    scene = Scene(31, workers=2)

    def lying(peer: PeerId, raw: bytes) -> bytes:
        contents = msgspec.msgpack.decode(raw, type=Contents)
        (file,) = contents.files
        other = msgspec.structs.replace(file, name="more", size_bytes=1)
        less = msgspec.structs.replace(file, size_bytes=file.size_bytes - 17)
        if contents.step > 0:
            contents = msgspec.structs.replace(contents, files=[less, other])
        return sealed_for(peer, msgspec.msgpack.encode(contents))

    monkeypatch.setattr(offering, "sealed_for", lying)

    async def main() -> None:
        async with scene.running(BUNDLE, disturbed=1):
            trainer, disk = (
                scene.simulation.peers["trainer"],
                scene.simulation.peers["standby"].disk,
            )
            for _ in range(4):
                await trainer.kill()
                await trainer.start_again()
                await scene.until("trainer trainer.step_trained", scene.trained("trainer") + 3)
                scene.heard.pop("standby standby.no_bundle", None)
                await scene.until("standby standby.no_bundle")
            names = [name for name in disk.list("standby") if name.endswith(CONTENTS)]
            assert len(names) == 2, names  # of the bundle held, and of the newest offer

    run_virtual(main, seed=1, limit_seconds=600)


@pytest.mark.slow
def test_a_bundle_in_transfer_leaves_nothing_when_the_standby_takes_over() -> None:
    """Its room is needed for training states, and it would never be used."""
    scene = Scene(25, workers=2)

    async def main() -> None:
        async with scene.running(BUNDLE, disturbed=1) as peers:
            disk = peers["standby"].disk
            with trio.fail_after(60):
                while len(disk.list("standby")) < 4:  # noqa: ASYNC110
                    await trio.sleep(1e-4)
            await peers["trainer"].kill()
            assert len(scene.heard["standby standby.bundle_received"]) == 1
            scene.takeover("standby", "trainer")
            await scene.until("standby trainer.step_trained", 3)
            assert disk.list("standby") == []

    run_virtual(main, seed=1, limit_seconds=600)
    assert not scene.simulation.violations


def test_a_standby_holds_no_verdicts_until_it_trains() -> None:
    scene = Scene(3, workers=2)

    async def main() -> None:
        async with scene.running(BUNDLE):
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

    run_virtual(main, seed=1, limit_seconds=3600)
    assert scene.simulation.violations == []


def test_a_trainer_that_is_replaced_while_it_trains_stops() -> None:
    """Nobody follows both, and what the first one trained since the bundle is not lost twice."""
    scene = Scene(5, workers=4)

    async def main() -> None:
        async with scene.running(BUNDLE):
            await scene.until("trainer trainer.step_trained", 9)
            scene.takeover("standby", "trainer")
            await scene.until("standby trainer.step_trained", 3)
            await scene.until("trainer standby.bundle_received", seconds=900)

    run_virtual(main, seed=1, limit_seconds=3600)
    scene.check()


@pytest.mark.parametrize("stands_by", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_trainer_that_takes_its_place_back_is_followed_even_without_a_bundle(
    stands_by: bool,
) -> None:
    """The standby has led the run to a later lineage, and is lost with its disk: the trainer goes
    on from its own state above that, which it may only read in the validators' copies of a log."""
    scene = Scene(11, workers=4)

    async def main() -> None:
        async with scene.running(BUNDLE, disturbed=1) as peers:
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

    run_virtual(main, seed=1, limit_seconds=3600)
    assert not scene.simulation.violations


@pytest.mark.parametrize(("name", "lineage"), [("standby", 32), ("second", 16)])
def test_two_standbys_would_begin_different_lineages(name: str, lineage: int) -> None:
    """So two that take over on both sides of a partition sign no policy of the same lineage and
    step, and the one that prevails has the later lineage, which everybody follows."""
    scene = Scene(13, workers=2, standbys=("standby", "second"))

    async def main() -> None:
        async with scene.running(disturbed=1):
            await scene.until(f"{name} standby.bundle_received")
            await scene.simulation.peers["trainer"].crash()
            scene.takeover(name, "trainer")
            await scene.until(f"{name} {PUBLISHED}")
            assert scene.heard[f"{name} {PUBLISHED}"][0]["lineage"] == lineage

    run_virtual(main, seed=1, limit_seconds=600)
    assert not scene.simulation.violations


@pytest.mark.slow
def test_a_trainer_that_did_not_hear_that_it_was_replaced_begins_above_the_standby() -> None:
    """It trains behind a cut line, and the owner's next version puts it back meanwhile."""
    scene = Scene(12, workers=4)

    async def main() -> None:
        async with scene.running(BUNDLE, disturbed=1):
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
            part.hear_manifest(sign_manifest(owner, later, wall))
            await trio.sleep(LONG_SECONDS)
            for other in others:
                network.heal(trainer.id, other.id)
            done = len(scene.heard["trainer trainer.checkpoint_published"])
            await scene.until("trainer trainer.rolled_back")
            await scene.until("trainer trainer.checkpoint_published", done + 3)
            newest = scene.heard["trainer trainer.checkpoint_published"][-1]
            assert newest["lineage"] == 32

    run_virtual(main, seed=1, limit_seconds=3600)
    assert not scene.simulation.violations


async def age_of_trainer(scene: Scene) -> float | None:
    """Ask when the trainer was heard last, as `swarm trainer takeover` does."""
    part = scene.simulation.peers["relay"].part
    assert part is not None
    status = RunStatus(part.run)
    answered = await ask_all_trusted(part.node, status)
    me = scene.simulation.identity("standby").peer_id
    trainer = scene.simulation.identity("trainer").peer_id
    return await last_sign_of_life(part.node, status, answered, trainer, me)


def test_the_age_of_the_trainers_last_sign_of_life() -> None:
    scene = Scene(6, workers=0)

    async def main() -> None:
        async with scene.running("trainer trainer.step_opened"):
            assert await age_of_trainer(scene) == 0.0
            await trio.sleep(10)
            await scene.simulation.peers["trainer"].kill()
            await trio.sleep(10)
            age = await age_of_trainer(scene)
            assert age is not None and 10 <= age < GONE_SECONDS
            await trio.sleep(65)
            age = await age_of_trainer(scene)
            assert age is not None and age >= GONE_SECONDS

    run_virtual(main, seed=1, limit_seconds=600)
    assert not scene.simulation.violations


@pytest.mark.parametrize("returns", [False, True])
def test_a_trainer_that_nobody_reports_is_listened_for(
    returns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The validators were started after it was lost, or it has not been heard yet."""
    scene = Scene(7, workers=0)

    async def main() -> None:
        async with scene.running("trainer trainer.step_opened") as peers:
            for name in TRUSTED:
                await peers[name].kill()
            with pytest.raises(UserError, match=r"no other trusted peer of run .* answered within"):
                await age_of_trainer(scene)
            for name in VALIDATORS:
                await peers[name].start(resume=True)
            await trio.sleep(5)
            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                if returns:
                    nursery.start_soon(start_later, peers["trainer"], 8.0)
                    age = await age_of_trainer(scene)
                    assert age is not None and age < 10
                else:
                    assert await age_of_trainer(scene) is None
                    assert trio.current_time() - began >= LISTENING_SECONDS

    run_virtual(main, seed=1, limit_seconds=600)
    assert not scene.simulation.violations
    assert "listening for 20 s for a sign of life" in capsys.readouterr().out


async def start_later(peer: Peer, seconds: float) -> None:
    await trio.sleep(seconds)
    await peer.start(resume=True)


def ledger(scene: Scene) -> LedgerState:
    """The run's state by the logs of all trusted peers, as they are on their disks."""
    part = scene.simulation.peers["v0"].part
    assert part is not None
    logs = [
        Log(
            scene.simulation.peers[name].disk.database("ledger.sqlite"),
            scene.simulation.identity(name).peer_id,
        )
        for name in TRUSTED
    ]
    records = [
        Record(log.owner, index, decode(raw))
        for log in logs
        for index, raw in enumerate(log.entries(log.start(), log.size()), log.start())
    ]
    return ledger_state(records, Authority.of(part.run.owners, part.run.manifest))


@pytest.mark.parametrize("who", ["trainer", "standby"])
def test_where_every_state_is_lost_the_newest_policy_is_enough(who: str) -> None:
    """The trainer has its key and an empty disk, or a standby that never ran takes over."""
    scene = Scene(9, workers=4, step_seconds=4.0)

    async def main() -> None:
        async with scene.running() as peers:
            await peers["standby"].kill()
            peers["standby"].disk = SimulatedDisk("standby")
            await scene.until("trainer trainer.step_trained", 4)
            await trio.sleep(3)  # the validators have copied the log
            await peers["trainer"].crash()
            peers["trainer"].disk = SimulatedDisk("trainer")
            before = scene.heard["trainer trainer.checkpoint_published"]
            step = len(before) - 1
            if who == "standby":
                scene.takeover("standby", "trainer")
            await peers[who].start_again()
            await trio.sleep(30)
            assert not peers[who].alive
            assert "this home has no training state" in str(peers[who].ended)
            left = ["restored.new/0-9", "restored.new.partial/0-9", "inherited.new/0-9"]
            for name in [f"restored/0-{step}/.manifest", *left]:  # of commands that were stopped
                await peers[who].disk.write(f"trainer/{name}", b"")
            await peers[who].start()
            await scene.until(f"{who} trainer.step_trained", scene.trained(who) + 3)
            after = scene.heard[f"{who} trainer.checkpoint_published"]
            new = [(each["lineage"], each["step"]) for each in after if each["lineage"]]
            assert new[:3] == [(16, step), (16, step + 1), (16, step + 2)]
            names = peers[who].disk.list("trainer")
            assert not [name for name in names if "restored" in name or "inherited" in name]
            assert ledger(scene).credits

    run_virtual(main, seed=1, limit_seconds=3600)
    (found,) = scene.simulation.violations
    assert "this home has no training state" in found


STEPS = 8


def test_a_finished_trainer_hands_its_last_state_over_and_the_standby_rests() -> None:
    """Bundles are an hour apart, so without that the standby would hold the state of the start."""
    scene = Scene(11, workers=4, standby_minutes=60.0, steps=STEPS)
    asked: list[Any] = []

    async def main() -> None:
        async with scene.running("trainer trainer.run_complete"):
            asked.extend(scene.heard["standby standby.no_bundle"])  # before the trainer served
            await scene.until("standby standby.run_over", seconds=60)
            await trio.sleep(60)
            peers = scene.simulation.peers
            assert not peers["trainer"].alive and not peers["standby"].alive
            assert f"standby/0-{STEPS}{CONTENTS}" in [
                f"standby/{name}" for name in peers["standby"].disk.list("standby")
            ]

    run_virtual(main, seed=1, limit_seconds=3600)
    (over,) = scene.heard["standby standby.run_over"]
    assert (over["step"], over["steps_behind"]) == (STEPS, 0)
    waits = scene.heard["trainer trainer.handing_over"]
    assert waits[0]["waiting_for"] == [scene.simulation.peers["standby"].id]
    assert scene.heard["standby standby.no_bundle"] == asked
    assert scene.simulation.violations == []


def test_a_trainer_does_not_wait_for_a_standby_that_is_gone_and_which_then_says_what_it_lacks() -> (
    None
):
    scene = Scene(12, workers=4, standby_minutes=60.0, steps=STEPS)

    async def main() -> None:
        async with scene.running(BUNDLE) as peers:
            await peers["standby"].kill()
            await scene.until("trainer trainer.run_complete")
            await trio.sleep(90)  # it may have asked 75 s ago
            assert not peers["trainer"].alive
            await peers["standby"].start(resume=True)
            await scene.until("standby standby.run_over", seconds=120)
            refused = len(scene.heard["standby standby.no_bundle"])
            await trio.sleep(60)
            assert refused <= 4 and not peers["standby"].alive
            assert len(scene.heard["standby standby.no_bundle"]) == refused

    run_virtual(main, seed=1, limit_seconds=3600)
    (over,) = scene.heard["standby standby.run_over"]
    assert over["steps_behind"] == STEPS - int(str(over["step"]))
    said = sentence("standby.run_over", over)
    assert said is not None and "lacks its last" in said
    assert scene.simulation.violations == []


@pytest.mark.slow
def test_20_peers_lose_their_trainer_for_good_while_others_crash() -> None:
    """Every credit and receipt of the old lineage stays, and the work goes on."""
    scene = Scene(8, workers=14, step_seconds=4.0)
    chance = Random(8)

    async def main() -> None:
        async with scene.running() as peers:
            assert len(peers) == 20
            await scene.until("standby standby.bundle_received")
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

    run_virtual(main, seed=1, limit_seconds=3600)
    assert not scene.simulation.violations
