"""A standby takes the trainer's place, and the trainer returns: invariants hold in every case."""

from __future__ import annotations

import pytest
import trio

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Peer, Plan, Simulation
from swarm.app.onlooker import RunStatus
from swarm.app.takeover import LISTENING_SECONDS, ask_all_trusted, until_gone
from swarm.envelope import Envelope
from swarm.errors import UserError
from swarm.events import Event
from swarm.run.update import sign_takeover

VALIDATORS = ["v0", "v1"]
TRUSTED = ["trainer", "standby", *VALIDATORS]
STATE_SECONDS = {"trainer": {"standby_minutes": 0.1}}


class Scene:
    """A run with a trainer and a standby, and what they did."""

    def __init__(self, seed: int, workers: int) -> None:
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
            self.simulation, trainers=["trainer"], validators=VALIDATORS, standbys=["standby"],
            steps=100_000, groups_per_step=16, max_new_tokens=256,
        )  # fmt: skip
        learner = Hardware(step_seconds=1.0)
        checker = Hardware(prefill_tokens_per_second=1e6)
        plans = [
            *(Plan(name, ["validator"], hardware=checker) for name in VALIDATORS),
            *(
                Plan(name, ["trainer"], hardware=learner, tables=STATE_SECONDS)
                for name in ("trainer", "standby")
            ),
            *(Plan(name, ["inference"], hardware=Hardware()) for name in self.workers),
            Plan("relay", ["relay"]),
        ]
        for plan in plans:
            await self.simulation.add(plan).start()

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


@pytest.mark.parametrize("after_seconds", [2.0, 23.9])
def test_the_standby_goes_on_and_the_trainer_stands_by_when_it_returns(
    after_seconds: float,
) -> None:
    scene = Scene(int(after_seconds * 10), workers=4)

    async def main() -> None:
        async with scene.simulation.running():
            await scene.start()
            await scene.until("standby standby.bundle_received")
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


def test_a_trainer_that_is_replaced_while_it_trains_stops() -> None:
    """Nobody follows both, and what the first one trained since the bundle is not lost twice."""
    scene = Scene(5, workers=4)

    async def main() -> None:
        async with scene.simulation.running():
            await scene.start()
            await scene.until("standby standby.bundle_received")
            await scene.until("trainer trainer.step_trained", 9)
            scene.takeover("standby", "trainer")
            await scene.until("standby trainer.step_trained", 3)
            await scene.until("trainer standby.bundle_received", seconds=900)

    run_virtual(main, seed=1, limit_seconds=3600)
    scene.check()


async def look_for_trainer(scene: Scene) -> None:
    """Ask whether the trainer is gone, as `swarm trainer takeover` does."""
    part = scene.simulation.peers["relay"].part
    assert part is not None
    status = RunStatus(part.run)
    answered = await ask_all_trusted(part.node, status)
    me = scene.simulation.identity("standby").peer_id
    trainer = scene.simulation.identity("trainer").peer_id
    await until_gone(part.node, status, answered, trainer, me)


def test_a_trainer_is_gone_once_it_was_not_heard_for_a_minute() -> None:
    scene = Scene(6, workers=0)

    async def main() -> None:
        async with scene.simulation.running():
            await scene.start()
            await scene.until("trainer trainer.step_opened")
            with pytest.raises(UserError, match=r"was heard 0 s ago"):
                await look_for_trainer(scene)
            await trio.sleep(10)
            await scene.simulation.peers["trainer"].kill()
            await trio.sleep(10)
            with pytest.raises(
                UserError, match=r"was heard [12]\d s ago; stop it first, and wait 60"
            ):
                await look_for_trainer(scene)
            await trio.sleep(65)
            await look_for_trainer(scene)

    run_virtual(main, seed=1, limit_seconds=600)
    assert not scene.simulation.violations


@pytest.mark.parametrize("returns", [False, True])
def test_a_trainer_that_nobody_reports_is_listened_for(
    returns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The validators were started after it was lost, or it has not been heard yet."""
    scene = Scene(7, workers=0)

    async def main() -> None:
        async with scene.simulation.running():
            await scene.start()
            await scene.until("trainer trainer.step_opened")
            peers = scene.simulation.peers
            for name in TRUSTED:
                await peers[name].kill()
            with pytest.raises(UserError, match=r"no other trusted peer of run .* answered within"):
                await look_for_trainer(scene)
            for name in VALIDATORS:
                await peers[name].start(resume=True)
            await trio.sleep(5)
            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                if not returns:
                    await look_for_trainer(scene)
                    assert trio.current_time() - began >= LISTENING_SECONDS
                    return
                nursery.start_soon(start_later, peers["trainer"], 8.0)
                with pytest.raises(UserError, match=r"was heard \d s ago"):
                    await look_for_trainer(scene)

    run_virtual(main, seed=1, limit_seconds=600)
    assert not scene.simulation.violations
    assert "listening for 20 s for a sign of life" in capsys.readouterr().out


async def start_later(peer: Peer, seconds: float) -> None:
    await trio.sleep(seconds)
    await peer.start(resume=True)
