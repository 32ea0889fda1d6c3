"""A process dies at every moment of making a bundle, or of taking over with it.

The standby never has less than before, the trainer's next process makes another bundle, and neither
disk keeps more than it needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio

from peers.trainer.saving import INHERITED
from peers.trainer.standby import following, offering
from simnet.clock import run_virtual
from simnet.disk import SimulatedDisk
from simnet.extents import Content
from tests.simnet.test_takeover import Scene

MADE = "trainer trainer.bundle_made"
BUNDLES_EACH_LIFE = 3
"""With the third, the first one is deleted."""


class MortalDisk(SimulatedDisk):
    """Stops before a chosen one of the changes to some folders, as when its process is killed."""

    def __init__(self, name: str, *folders: str) -> None:
        super().__init__(name)
        self.folders = folders
        """Paths whose changes count begin with one of these."""
        self.left = -1
        """Changes until it stops; negative: it does not."""
        self.dead = trio.Event()

    def _change_comes(self, path: str) -> None:
        if not path.startswith(self.folders) or self.left < 0:
            return
        if self.left == 0:
            self.lose_power()
            self.dead.set()
        self.left -= 1

    def put(self, path: str, offset: int, content: Content) -> None:
        self._change_comes(path)
        self.check_power()
        super().put(path, offset, content)

    async def write(self, path: str, data: bytes) -> None:
        self._change_comes(path)
        await super().write(path, data)

    async def allocate(self, path: str, size_bytes: int) -> None:
        self._change_comes(path)
        await super().allocate(path, size_bytes)

    async def sync(self, path: str) -> None:
        self._change_comes(path)
        await super().sync(path)

    async def rename(self, old: str, new: str) -> None:
        self._change_comes(new)
        await super().rename(old, new)

    async def remove(self, path: str) -> None:
        self._change_comes(path)
        await super().remove(path)

    def bundles(self) -> list[str]:
        """Folders of bundles, whole or not."""
        made = {name.split("/")[1] for name in self.files() if name.startswith(f"{offering.ROOT}/")}
        making = [name for name in self.files() if name.startswith(offering.MAKING)]
        return sorted(made) + making[:1]


async def first_of(wait: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
    """Wait for one of several, and end the wait for the others."""
    await wait()
    scope.cancel()


def newest(scene: Scene) -> tuple[int, int]:
    """The newest state of which the standby has a whole bundle."""
    received = scene.heard["standby standby.bundle_received"][-1]
    return int(str(received["lineage"])), int(str(received["step"]))


@pytest.mark.slow
@pytest.mark.parametrize("power", [True, False], ids=["power cut", "killed"])
def test_the_trainer_dies_at_every_moment_of_a_bundle(power: bool) -> None:
    scene = Scene(26, workers=1, step_seconds=0.3, standby_minutes=0.005)
    scene.disks["trainer"] = disk = MortalDisk("trainer", f"{offering.ROOT}/", offering.MAKING)
    moments = 0

    async def life(moment: int) -> bool:
        """One process, which dies at a moment; False: it made its bundles before."""
        trainer = scene.simulation.peers["trainer"]
        scene.heard.pop(MADE, None)
        disk.left, disk.dead = moment, trio.Event()
        await trainer.start_again()
        async with trio.open_nursery() as nursery:
            for wait in (disk.dead.wait, partial(scene.until, MADE, BUNDLES_EACH_LIFE)):
                nursery.start_soon(first_of, wait, nursery.cancel_scope)
        died = disk.dead.is_set()
        await (trainer.crash() if power else trainer.kill())
        disk.left = -1
        assert len(disk.bundles()) <= offering.BUNDLES_KEPT + 1, disk.bundles()
        return died

    async def main() -> None:
        nonlocal moments
        async with scene.simulation.running():
            await scene.start()
            scene.simulation.disturbed = 1
            peers = scene.simulation.peers
            await scene.until("standby standby.bundle_received")
            await peers["trainer"].kill()
            held = newest(scene)
            while await life(moments):
                moments += 1
                assert newest(scene) >= held
                held = newest(scene)
            await peers["trainer"].start_again()
            received = len(scene.heard["standby standby.bundle_received"])
            await scene.until("standby standby.bundle_received", received + 1)
            assert newest(scene) > held
            assert len(disk.bundles()) <= offering.BUNDLES_KEPT
            await peers["trainer"].kill()
            assert await life(6) and disk.exists(offering.MAKING)
            scene.takeover("standby", "trainer")
            await scene.until("standby trainer.step_trained", 3)
            await peers["trainer"].start_again()
            await scene.until("trainer standby.bundle_received")
            assert disk.bundles() == []

    run_virtual(main, seed=1, limit_seconds=7200)
    assert not scene.simulation.violations
    assert moments > 20


@pytest.mark.parametrize("power", [True, False], ids=["power cut", "killed"])
def test_the_standby_dies_at_every_moment_of_taking_over(power: bool) -> None:
    scene = Scene(29, workers=1, step_seconds=0.3)
    scene.disks["standby"] = disk = MortalDisk("standby", following.ROOT, INHERITED)
    moments = 0

    async def life(moment: int) -> bool:
        """One process, which dies at a moment; False: it has trained before."""
        standby = scene.simulation.peers["standby"]
        disk.left, disk.dead = moment, trio.Event()
        await standby.start_again()
        async with trio.open_nursery() as nursery:
            trained = partial(scene.until, "standby trainer.step_trained")
            for wait in (disk.dead.wait, trained):
                nursery.start_soon(first_of, wait, nursery.cancel_scope)
        if not disk.dead.is_set():
            return False
        await (standby.crash() if power else standby.kill())
        disk.left = -1
        return True

    async def main() -> None:
        nonlocal moments
        async with scene.simulation.running():
            await scene.start()
            scene.simulation.disturbed = 1
            peers = scene.simulation.peers
            await scene.until("standby standby.bundle_received")
            await peers["trainer"].kill()
            await peers["standby"].kill()
            scene.takeover("standby", "trainer")
            await trio.sleep(60)  # the bootstrap peer has heard of it
            while await life(moments):
                moments += 1
            await scene.until("standby trainer.step_trained", 3)
            assert disk.list(following.ROOT) == []
            assert not [name for name in disk.list("trainer") if "inherited" in name]
            published = scene.heard["standby trainer.checkpoint_published"]
            assert {each["lineage"] for each in published} == {16}

    run_virtual(main, seed=1, limit_seconds=7200)
    assert not scene.simulation.violations
    assert moments > 10
