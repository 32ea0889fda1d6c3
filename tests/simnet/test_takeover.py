"""A standby takes the trainer's place, and the trainer returns: invariants hold in every case."""

from __future__ import annotations

import pytest
import trio

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Peer, Plan, Simulation
from swarm.envelope import Envelope
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
