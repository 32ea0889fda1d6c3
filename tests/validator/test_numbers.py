"""Numbers of submissions: only a worker's next number is acknowledged, and none can be skipped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from blake3 import blake3

from peers.validator.role import ValidatorRole
from simnet.adversaries.base import Adversary
from simnet.compute.rollouts import rollouts
from simnet.compute.setting import Hardware, Setting, Workload
from simnet.simulation import Peer, Plan, Simulation
from swarm.jobs import SubmissionOrder
from swarm.node.run_node import RunNode
from swarm.rollouts.seeds import nonce_of
from swarm.transport import BlobReference, Refused
from swarm.wire.envelope import Envelope, seal
from swarm.wire.manifest import Admissions
from swarm.wire.messages import (
    Acknowledgement,
    Admission,
    AdmissionRefused,
    Message,
    StepOrder,
    Submission,
    Verdict,
)
from tests.trainer.runs import RUN, Said, simulated, start_run

RUNNER = RUN


class Hand:
    """A peer that announces by hand, instead of a worker."""

    def __init__(self, peer: Peer, workload: Workload) -> None:
        self.part = part_of(peer)
        self.id = self.part.peer_id
        order = self.part.step_order()
        assert order is not None and self.part.lease is not None
        self.order: StepOrder = order
        self._setting = Setting(peer.disk, Hardware(), workload)

    def make(self, number: int, variant: int = 0) -> bytes:
        """An honest file; the variants of a number differ in rounding."""
        sampling = self.part.run.manifest.sampling
        order = SubmissionOrder(
            run=self.part.run.id, policy=self.order.checkpoint, step=self.order.step,
            nonce=nonce_of(self.order.nonce, self.part.entry), worker=self.id, number=number,
            groups=sampling.groups_per_submission,
            environments=self.part.run.manifest.environments, sampling=sampling,
        )  # fmt: skip
        made = rollouts(self._setting, order)
        made.variant = variant
        return msgspec.msgpack.encode(made)

    async def push(self, validator: Peer, data: bytes) -> None:
        reference = BlobReference(blake3(data).digest(), len(data))
        sink = part_of(validator).blobs.accept(self.id, reference)
        sink.write(data)
        await sink.commit(sink.finish())

    async def announce(
        self, validator: Peer, number: int, *shown: Envelope, variant: int = 0, groups: int = 1
    ) -> list[Envelope]:
        data = self.make(number, variant)
        submission = Submission(
            lineage=0, step=self.order.step, policy=self.order.policy, number=number,
            digest=blake3(data).digest(), size_bytes=len(data), groups=groups,
            run_digest=self.order.run_digest, entry=self.part.entry,
        )  # fmt: skip
        announced = await self.part.seal(submission, 600.0)
        assert self.part.lease is not None and self.part.lease.admission is not None
        return await self.part.messenger.request(
            validator.id, announced, self.part.lease.admission, *shown
        )

    async def deliver(
        self, validator: Peer, number: int, *shown: Envelope, variant: int = 0
    ) -> list[Envelope]:
        await self.push(validator, self.make(number, variant))
        return await self.announce(validator, number, *shown, variant=variant)


def kinds(answer: Sequence[Envelope]) -> list[type[Message]]:
    return [type(each.message) for each in answer]


@asynccontextmanager
async def submitting(
    *validators: str,
    absent: Sequence[str] = (),
    speed: float = 40_000.0,
    trial: bool = False,
    **run: Any,
) -> AsyncIterator[tuple[Simulation, dict[str, Peer], Hand, Said]]:
    """Validators, a trainer, an idle peer in a worker's place, and what was said.

    `absent` validators are named in the manifest and never there. `speed`: that of a validator's
    prefill, in tokens per second.
    """
    present = validators or ("validator",)
    async with simulated() as (simulation, said):
        peers = await start_run(
            simulation, *present, "trainer", groups_per_submission=1,
            admissions=Admissions(trial=trial),
            validators=[*present, *absent], prefill_tokens_per_second=speed,
            **run,
        )  # fmt: skip
        worker = await start_idle(simulation, "worker")
        await trio.sleep(20)
        yield simulation, peers, Hand(worker, simulation.workload), said


async def start_idle(simulation: Simulation, name: str) -> Peer:
    """Start a peer with the role inference that does nothing by itself."""
    peer = simulation.add(Plan(name, ["inference"], acts=Adversary))
    await peer.start()
    return peer


def part_of(peer: Peer) -> RunNode:
    assert peer.part is not None
    return peer.part


async def test_a_later_number_is_neither_acknowledged_nor_announced_nor_judged() -> None:
    async with submitting() as (_, peers, worker, said):
        validator = peers["validator"]
        heard: list[Envelope] = []
        part_of(peers["trainer"]).gossip.listen(Acknowledgement, heard.append)
        for number in (1, 3, 7):
            assert await worker.deliver(validator, number) == []
        role = validator.roles[0]
        assert isinstance(role, ValidatorRole) and len(role._queue) == 0
        await trio.sleep(5)
        assert heard == []
        for number in (0, 1):
            answer = await worker.deliver(validator, number)
            assert kinds(answer) == [Acknowledgement]
        assert await worker.deliver(validator, 3) == []
        await trio.sleep(5)
        assert [each.expect(Acknowledgement).number for each in heard] == [0, 1]
    numbers = [each["number"] for each in said.named("validator.verdict")]
    assert numbers == [0, 1]


async def test_a_worker_on_trial_has_one_unjudged_submission() -> None:
    """And is no longer on trial once its first is recomputed and accepted."""
    async with submitting(trial=True, speed=1_000.0) as (_, peers, worker, said):
        validator = peers["validator"]
        assert worker.part.lease is not None and worker.part.lease.admission is not None
        assert worker.part.lease.admission.expect(Admission).trial
        assert kinds(await worker.deliver(validator, 0)) == [Acknowledgement]
        assert await worker.deliver(validator, 1) == []
        await trio.sleep(30)
        for number in (1, 2, 3):
            assert kinds(await worker.deliver(validator, number)) == [Acknowledgement]
        assert not worker.part.lease.admission.expect(Admission).trial
    outcomes = [each["outcome"] for each in said.named("validator.verdict")]
    assert outcomes[:1] == ["accepted"], outcomes


@pytest.mark.parametrize("role", ["relay", "observer"])
async def test_the_slot_of_another_role_lets_nobody_submit(role: str) -> None:
    """Else there would be `helpers_max` unproven workers beyond `unproven_max`."""
    async with submitting() as (simulation, peers, worker, _):
        helper = simulation.add(Plan("helper", [role], acts=Adversary))
        await helper.start()
        await trio.sleep(5)
        hand = Hand(helper, simulation.workload)
        with pytest.raises(Refused, match="role inference"):
            await hand.push(peers["validator"], hand.make(0))
        (no,) = await hand.announce(peers["validator"], 0)
        assert "inference" in no.expect(AdmissionRefused).reason
        assert kinds(await worker.deliver(peers["validator"], 0)) == [Acknowledgement]


async def test_announcing_a_number_without_its_file_settles_nothing() -> None:
    async with submitting() as (_, peers, worker, _):
        validator = peers["validator"]
        assert await worker.announce(validator, 0) == []
        assert await worker.deliver(validator, 1) == []
        await trio.sleep(60)
        assert kinds(await worker.deliver(validator, 0)) == [Acknowledgement]
        assert kinds(await worker.deliver(validator, 1)) == [Acknowledgement]


async def test_an_acknowledgement_is_signed_and_published_once() -> None:
    """Also after it was published, however often the worker asks while its file is judged."""
    async with submitting(speed=10.0) as (_, peers, worker, _):
        validator = peers["validator"]
        heard: list[Envelope] = []
        part_of(peers["trainer"]).gossip.listen(Acknowledgement, heard.append)
        await worker.push(validator, worker.make(0))
        said = [await worker.announce(validator, 0) for _ in range(20)]
        await trio.sleep(1)
        assert {kind for answer in said for kind in kinds(answer)} == {Acknowledgement}
        assert {answer[0].digest for answer in said} == {heard[0].digest} and len(heard) == 1


@pytest.mark.parametrize(
    ("by", "shown", "believed"),
    [
        ("silent", Verdict, True),
        ("silent", Acknowledgement, True),
        ("worker", Verdict, False),
        ("worker", Acknowledgement, False),
        ("", Verdict, False),
    ],
    ids=["verdict", "acknowledgement", "own-verdict", "own-acknowledgement", "unlogged"],
)
async def test_the_next_validator_takes_over_when_it_is_shown_a_receipt(
    by: str, shown: type[Message], believed: bool
) -> None:
    """Of the number before, by a validator that is never heard."""
    async with submitting(absent=["silent"]) as (simulation, peers, worker, _):
        named: dict[str, Any] = {
            "submission": bytes(32),
            "worker": worker.id,
            "step": worker.order.step,
        }
        receipt = seal(
            simulation.identity(by or "silent"),
            Acknowledgement(**named, number=0)
            if shown is Acknowledgement
            else Verdict(
                **named, number=0, lineage=0, policy=0, size_bytes=1, outcome="refused",
                log_index=7 if by else -1,
            ),
            run=worker.part.run.id, sequence=1, lifetime_seconds=600.0,
            wall_time=worker.part.node.world.wall_time(),
        )  # fmt: skip
        answer = await worker.deliver(peers["validator"], 1, receipt)
        assert kinds(answer) == ([Acknowledgement] if believed else [])


async def test_a_worker_that_makes_other_bytes_after_a_restart_goes_on() -> None:
    """Also at a validator that has not heard of its first file."""
    async with submitting("validator", "validator-2") as (simulation, peers, worker, _):
        first, second = peers["validator"], peers["validator-2"]
        for other in ("validator", "trainer", "bootstrap"):
            simulation.network.cut(second.id, simulation.peers[other].id)
        await worker.deliver(first, 0)
        refusal, receipt = await worker.deliver(first, 0, variant=1)
        assert isinstance(refusal.message, Verdict) and refusal.message.log_index == -1
        named = receipt.message
        assert isinstance(named, Acknowledgement | Verdict)
        assert named.submission == blake3(worker.make(0)).digest()
        answer = await worker.deliver(second, 1, receipt)
        assert kinds(answer) == [Acknowledgement]


async def test_no_group_of_a_submission_may_be_left_out() -> None:
    """Or a worker could choose how a submission ends."""
    async with submitting() as (_, peers, worker, _):
        await worker.push(peers["validator"], worker.make(0))
        for groups in (3, 5):
            (refusal,) = await worker.announce(peers["validator"], 0, groups=groups)
            assert isinstance(refusal.message, Verdict) and refusal.message.failed == "groups"
