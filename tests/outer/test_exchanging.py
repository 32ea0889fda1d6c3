"""Replicas that merge RL trainers' policies, in the simulator: each contributes every snapshot
once, whoever is killed when, and goes on alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import trio
from blake3 import blake3

from peers.outer.settings import ReplicaSettings
from simnet.clock import run_virtual
from simnet.compute.merging_exchange import AnswerNotes, SnapshotNotes
from simnet.scenarios.parts import SERVER, start_bootstrap
from simnet.scenarios.several_trainers import WORKLOAD
from simnet.simulation import Peer, Plan, Simulation
from swarm.errors import UserError
from swarm.settings import PeerSettings
from swarm.wire.manifest import Outer

EXCHANGE = "exchange"
OUTER = Outer(rounds=50, inner_steps=4, grace_seconds=20.0, deadline_seconds=60.0)


class RlTrainer:
    """Hands out snapshots through a peer's disk, and adopts the answers."""

    def __init__(self, peer: Peer, snapshots: int) -> None:
        self._peer, self._snapshots = peer, snapshots
        self.answers: dict[int, AnswerNotes] = {}
        self.adopted = 0
        self.problem = ""

    def name(self, number: int) -> str:
        """The name of the contribution of a snapshot."""
        return blake3(f"{self._peer.name} {number}".encode()).hexdigest()

    async def run(self) -> None:
        for number in range(1, self._snapshots + 1):
            notes = SnapshotNotes(f"{self._peer.name} {number}", self.adopted, self.problem)
            path = f"{EXCHANGE}/snapshot-{number}"
            await self._peer.disk.write(path, msgspec.msgpack.encode(notes))
            self.answers[number] = await self._answer(number)
            if not self.answers[number].problem:
                self.adopted = number
            await trio.sleep(5.0)

    async def _answer(self, number: int) -> AnswerNotes:
        while True:
            await trio.sleep(0.5)
            if f"answer-{number}" in self._peer.disk.list(EXCHANGE):
                raw = await self._peer.disk.read(f"{EXCHANGE}/answer-{number}")
                return msgspec.msgpack.decode(raw, type=AnswerNotes)

    def check(self) -> None:
        """Each answer is the change from the one before; nothing is counted twice."""
        before: list[str] = []
        for number, answer in self.answers.items():
            assert len(set(answer.merged)) == len(answer.merged)
            assert answer.before == before
            counts = self.name(number) in answer.merged
            assert counts == (answer.sent == self.name(number))
            others = set(answer.merged) - set(before) - {answer.sent}
            assert bool(others) == bool(answer.trainers)
            before = answer.merged


def simulate(main: Any, names: Sequence[str] = ("a", "b")) -> list[RlTrainer]:
    """Run replicas with their RL trainers beside `main(simulation, peers)`, until the first trainer
    and `main` are done."""
    trainers: list[RlTrainer] = []

    async def virtual() -> None:
        simulation = Simulation(1, workload=WORKLOAD)
        async with simulation.running():
            await start_bootstrap(simulation, trainers=names, validators=names[:1], outer=OUTER)
            peers = []
            for name in names:
                table = {"model": "simulated", "exchange": EXCHANGE}
                peers.append(
                    simulation.add(Plan(name, ["replica"], SERVER, tables={"replica": table}))
                )
                await peers[-1].start()
            trainers.extend(RlTrainer(peer, 4) for peer in peers)
            async with trio.open_nursery() as others:
                for trainer in trainers[1:]:
                    others.start_soon(trainer.run)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trainers[0].run)
                    nursery.start_soon(main, simulation, peers)
                await trio.sleep(5.0)
                others.cancel_scope.cancel()
        assert simulation.violations == []

    run_virtual(virtual, seed=1, limit_seconds=2000.0)
    for trainer in trainers:
        trainer.check()
    return trainers


async def undisturbed(simulation: Simulation, peers: Sequence[Peer]) -> None:
    pass


def test_two_swarms_contribute_and_get_each_others_changes() -> None:
    trainers = simulate(undisturbed)
    for trainer in trainers:
        assert [answer.sent for answer in trainer.answers.values()] == [
            trainer.name(number) for number in range(1, 5)
        ]
        assert all(answer.trainers == 1 for answer in trainer.answers.values())


@pytest.mark.parametrize(
    "after",
    [2.0, *(pytest.param(after, marks=pytest.mark.slow) for after in (0.0, 0.7, 1.3, 4.0, 7.0))],
)
def test_a_replica_killed_at_any_instant_contributes_each_snapshot_once(after: float) -> None:
    async def kill(simulation: Simulation, peers: Sequence[Peer]) -> None:
        for _ in range(2):
            heard = simulation.expect("outer.contributed", ["b"])
            await simulation.meet(heard, 100.0)
            await trio.sleep(after)
            await peers[1].kill()
            await peers[1].start()

    trainers = simulate(kill)
    assert [set(trainer.answers) for trainer in trainers] == [{1, 2, 3, 4}] * 2


def test_when_one_swarm_leaves_the_other_goes_on_alone() -> None:
    async def leave(simulation: Simulation, peers: Sequence[Peer]) -> None:
        assert await simulation.meet(simulation.expect("outer.answered", ["b"]), 100.0)
        await peers[1].kill()

    trainers = simulate(leave)
    assert [answer.trainers for answer in trainers[0].answers.values()][-2:] == [0, 0]


async def hand_over(simulation: Simulation, peer: Peer, number: int, adopted: int) -> AnswerNotes:
    """The answer to a snapshot of a policy that includes the answer `adopted`."""
    answered = simulation.expect("outer.answered", [peer.name])
    notes = msgspec.msgpack.encode(SnapshotNotes(f"{peer.name} {number}", adopted))
    await peer.disk.write(f"{EXCHANGE}/snapshot-{number}", notes)
    assert await simulation.meet(answered, 100.0)
    raw = await peer.disk.read(f"{EXCHANGE}/answer-{number}")
    return msgspec.msgpack.decode(raw, type=AnswerNotes)


def test_a_policy_that_includes_another_state_than_its_replica_believes() -> None:
    """After a refusal, a rollback of the trainer, and a loss of the replica's home."""

    async def alone() -> None:
        simulation = Simulation(1, workload=WORKLOAD)
        async with simulation.running():
            await start_bootstrap(simulation, trainers=["a"], validators=["a"], outer=OUTER)
            table = {"model": "simulated", "exchange": EXCHANGE}
            peer = simulation.add(Plan("a", ["replica"], SERVER, tables={"replica": table}))
            await peer.start()
            trainer = RlTrainer(peer, 1)
            trainer.problem = "its tokenizer is another"
            await trainer.run()
            assert trainer.answers[1].problem == "its tokenizer is another"
            second = await hand_over(simulation, peer, 2, adopted=0)
            assert (second.before, second.sent) == ([], trainer.name(2))
            rolled_back = await hand_over(simulation, peer, 3, adopted=0)
            assert (rolled_back.before, rolled_back.trainers) == (None, 1)
            assert rolled_back.merged == second.merged  # it was not contributed, but takes over
            lost = await hand_over(simulation, peer, 9, adopted=8)
            assert (lost.before, lost.sent) == (second.merged, trainer.name(9))
        assert simulation.violations == []

    run_virtual(alone, seed=1, limit_seconds=1000.0)


def test_a_replica_with_data_of_its_own_cannot_exchange() -> None:
    table = {"model": "base", "data": ["text.txt"], "exchange": "folder"}
    with pytest.raises(UserError, match=r"replica\.exchange and replica.data are both set"):
        PeerSettings(role=["replica"], tables={"replica": table}).of("replica", ReplicaSettings)
