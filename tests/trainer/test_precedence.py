"""A trainer takes what a later validator accepted once those before it in rank had their time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio

from peers.trainer.precedence import SILENT_WAITS_MAX
from peers.trainer.role import TrainerRole
from peers.validator.cases import Case
from peers.validator.examiner import Examiner
from peers.validator.reception import Precedence
from peers.validator.role import ValidatorRole
from simnet.compute.rollouts import SimulatedRollouts
from simnet.simulation import Peer, Simulation
from swarm.jobs.validation import Judge, PrefillService
from swarm.wire.messages import Acknowledgement
from tests.orders import verdict
from tests.trainer.runs import RUN
from tests.validator.test_numbers import Hand, kinds, submitting
from tests.validator.test_rank import ONCE, TWO, VERDICT_SECONDS, in_rank

RUNNER = RUN


class Credulous(Examiner):
    """Accepts without a recomputation."""

    async def _recompute(
        self, case: Case, job: Judge, prefill: PrefillService, outcome: Any
    ) -> Any:
        return


class Cheat(Hand):
    """Makes files of another model."""

    def make(self, number: int, variant: int = 0) -> bytes:
        made = msgspec.msgpack.decode(super().make(number, variant), type=SimulatedRollouts)
        return msgspec.msgpack.encode(msgspec.structs.replace(made, invented=True))


def pool(trainer: Peer) -> int:
    """Groups that the trainer may train on."""
    role = trainer.roles[0]
    assert isinstance(role, TrainerRole)
    return role._accepted.pool.groups


async def accepted_by_a_later_one(
    simulation: Simulation, hand: Hand, peers: dict[str, Peer]
) -> None:
    first, second = in_rank(hand, peers)
    simulation.network.cut(first.id, second.id)
    assert kinds(await hand.deliver(second, 0)) == [Acknowledgement]
    await trio.sleep(8)
    role = second.roles[0]
    assert isinstance(role, ValidatorRole) and role._docket.judged_here()


async def test_an_acceptance_waits_for_an_earlier_validator_that_may_refuse() -> None:
    """It cannot fetch the file here, so its time passes."""
    async with submitting(*TWO, thresholds=ONCE) as (simulation, peers, worker, _):
        await accepted_by_a_later_one(simulation, worker, peers)
        assert pool(peers["trainer"]) == 0
        await trio.sleep(VERDICT_SECONDS)
        assert pool(peers["trainer"]) == 1


async def test_nothing_waits_beyond_the_end_of_the_run() -> None:
    """Else an accepted submission would stand neither in the log nor in the pool."""
    async with submitting(*TWO, thresholds=ONCE) as (simulation, peers, worker, _):
        await accepted_by_a_later_one(simulation, worker, peers)
        trainer = peers["trainer"].roles[0]
        assert isinstance(trainer, TrainerRole)
        trainer._progress.advance(trainer._peer.run.manifest.schedule.steps)
        trainer._progress.changed.touch()
        await trio.sleep(1)
        assert pool(peers["trainer"]) == 1


async def test_a_validator_that_stays_silent_delays_only_the_first_acceptances() -> None:
    """It is reachable, but neither acknowledges nor judges."""
    async with submitting(*TWO, thresholds=ONCE) as (_, peers, worker, _):
        first, _ = in_rank(worker, peers)
        trainer = peers["trainer"].roles[0]
        assert isinstance(trainer, TrainerRole)
        precedence = trainer._collector.precedence
        seconds = []
        for _ in range(SILENT_WAITS_MAX + 1):
            began = trio.current_time()
            await precedence._wait_for(str(first.id), verdict(0))
            seconds.append(round(trio.current_time() - began))
        limits = trainer._peer.run.manifest.limits
        assert seconds[0] == seconds[-2] == limits.verdict_seconds
        assert seconds[-1] == limits.acknowledgement_seconds


async def test_nothing_waits_for_a_validator_that_is_gone() -> None:
    async with submitting(*TWO, thresholds=ONCE) as (_, peers, worker, _):
        first, second = in_rank(worker, peers)
        await first.kill()
        assert kinds(await worker.deliver(second, 0)) == [Acknowledgement]
        await trio.sleep(15)
        assert pool(peers["trainer"]) == 1


async def test_nothing_that_an_earlier_validator_refuses_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although a dishonest validator accepted it out of rank."""

    async def nobody(*_: object) -> None:
        return

    monkeypatch.setattr(Precedence, "earlier", nobody)
    async with submitting(*TWO, thresholds=ONCE, speed=100.0) as (simulation, peers, _, said):
        cheat = Cheat(simulation.peers["worker"], simulation.workload)
        second = in_rank(cheat, peers)[1]
        liar = second.roles[0]
        assert isinstance(liar, ValidatorRole)
        liar._examiner.__class__ = Credulous
        assert kinds(await cheat.deliver(second, 0)) == [Acknowledgement]
        for _ in range(400):
            assert pool(peers["trainer"]) == 0
            await trio.sleep(0.1)
    outcomes = [each["outcome"] for each in said.named("validator.verdict")]
    assert outcomes == ["accepted", "refused"]
