"""Two RL learners merge through replicas in processes of their own. One replica is killed and
comes back, and later its swarm leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trio

from peers.demo.setup import Setting
from peers.learning import merging_folder as exchange
from peers.learning.learner import Learner
from swarm.jobs.training import Snapshot
from swarm.wire.manifest import Outer
from tests.end_to_end.harness import START_SECONDS, STEP_SECONDS, Peer
from tests.end_to_end.test_several_trainers import make_peers
from tests.trainer.test_learner import SETTINGS, random_groups, teach, weights_of

OUTER = Outer(
    rounds=10,
    inner_steps=1,
    momentum=0.0,
    learning_rate=1.0,
    deadline_seconds=STEP_SECONDS,
    compression="fp32",
)


class RlTrainer:
    """A learner that exchanges with the replica of a home."""

    def __init__(self, folder: Path, replica: str, seed: int) -> None:
        self.exchange = folder / replica / "exchange"
        self.learner = Learner(folder / "model", SETTINGS)
        self._seed = seed
        self._number = 0

    def hand_out(self) -> None:
        """Take a step, and hand out the next snapshot."""
        step = self.learner.step
        teach(self.learner, random_groups(100 * self._seed + step, policy=step), step)
        handed = Snapshot(
            exchange=str(self.exchange), number=self._number + 1, adopted=self._number, steps=1
        )
        self._number += 1
        self.learner.begin_save(None, handed=handed)
        self.learner.finish_save()

    async def adopt(self) -> int:
        """Wait for the answer and adopt it; return how many other swarms it includes."""
        with trio.fail_after(START_SECONDS):
            while True:
                if self._number in exchange.look(self.exchange).answers:
                    break
                await trio.sleep(0.1)
        found = self.learner.adopt(self.exchange, self._number)
        assert found.problem == ""
        return found.trainers


@pytest.mark.slow
def test_two_swarms_merge_and_one_goes_on_alone(tmp_path: Path, fork_server: Path) -> None:
    def table(home: Path) -> dict[str, Setting]:
        return {"data": [], "exchange": str(home / "exchange")}

    async def main() -> None:
        bootstrap, *replicas = make_peers(tmp_path, fork_server, OUTER, table)
        one, two = (RlTrainer(tmp_path, peer.name, seed) for seed, peer in enumerate(replicas))
        async with trio.open_nursery() as nursery:
            bootstrap.start(nursery)
            await bootstrap.says("peer.listening", seconds=START_SECONDS)
            for peer in replicas:
                peer.start(nursery)
            for peer in replicas:
                await peer.says("outer.together", seconds=START_SECONDS)
            await both_merge(one, two, replicas[1], 1)
            since = len(replicas[1].events)
            await replicas[1].kill()
            replicas[1].start(nursery)
            await replicas[1].says("outer.together", since=since, seconds=START_SECONDS)
            await both_merge(one, two, replicas[1], 2)
            await replicas[1].kill()
            one.hand_out()
            assert await one.adopt() == 0
            await replicas[0].says("outer.alone")
            nursery.cancel_scope.cancel()

    trio.run(main)


async def both_merge(one: RlTrainer, two: RlTrainer, other: Peer, round: int) -> None:
    """Merge a snapshot of each in a round; then both have the same weights."""
    two.hand_out()
    await other.says("outer.contributed", round=round, seconds=START_SECONDS)
    one.hand_out()
    assert [await one.adopt(), await two.adopt()] == [1, 1]
    torch.testing.assert_close(weights_of(one.learner), weights_of(two.learner), rtol=0, atol=1e-6)
