"""Rank: a validator judges only what those before it in rank cannot."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from simnet.simulation import Peer
from swarm.run.work import judges_of
from swarm.wire.envelope import Envelope
from swarm.wire.manifest import Thresholds
from swarm.wire.messages import Acknowledgement, AdmissionRefused, Verdict
from tests.trainer.runs import RUN
from tests.validator.test_numbers import Hand, kinds, part_of, submitting

RUNNER = RUN
TWO = ("validator", "validator-2")
THREE = (*TWO, "validator-3")

ONCE = Thresholds(second_share=0.0, measured_tokens=1)
"""No second opinions."""
VERDICT_SECONDS = 30.0
"""The default limit of a run."""


def in_rank(worker: Hand, peers: dict[str, Peer], number: int = 0) -> list[Peer]:
    """The validators in the order in which `worker` has to ask them."""
    manifest = worker.part.run.manifest
    by_id = {str(peer.id): peer for peer in peers.values()}
    ranks = judges_of(manifest.validator_ids(), worker.order.nonce, worker.id, number)
    return [by_id[validator] for validator in ranks if validator in by_id]


def sent_to(answer: Sequence[Envelope], first: Peer) -> bool:
    """Whether an answer is the request of validator `first` to deliver there."""
    (envelope,) = answer
    message = envelope.message
    return (
        isinstance(message, AdmissionRefused)
        and envelope.sender == str(first.id)
        and str(first.id) in message.reason
    )


async def test_a_worker_that_asks_a_later_validator_is_sent_to_the_first() -> None:
    async with submitting(*THREE, thresholds=ONCE) as (_, peers, worker, said):
        first, second, third = in_rank(worker, peers)
        for later in (third, second):
            assert sent_to(await worker.deliver(later, 0), first)
        assert kinds(await worker.deliver(first, 0)) == [Acknowledgement]
        (answer,) = await worker.announce(second, 0)
        assert answer.sender == str(first.id), "it has judged or acknowledged it"
        await trio.sleep(10)
    assert len(said.named("validator.verdict")) == 1


async def test_a_validator_takes_over_at_once_when_the_first_cannot_be_reached() -> None:
    async with submitting(*TWO) as (simulation, peers, worker, _):
        first, second = in_rank(worker, peers)
        simulation.network.cut(first.id, second.id)
        assert kinds(await worker.deliver(second, 0)) == [Acknowledgement]


async def test_a_validator_takes_over_when_the_first_had_its_time() -> None:
    """The worker may be unable to reach it, which only the worker knows."""
    async with submitting(*TWO) as (_, peers, worker, _):
        first, second = in_rank(worker, peers)
        assert sent_to(await worker.deliver(second, 0), first)
        await trio.sleep(VERDICT_SECONDS - 5)
        assert sent_to(await worker.announce(second, 0), first)
        await trio.sleep(5)
        assert kinds(await worker.announce(second, 0)) == [Acknowledgement]


async def test_a_validator_takes_over_when_the_verdict_of_the_first_is_late() -> None:
    async with submitting(*TWO, speed=1.0) as (_, peers, worker, _):
        first, second = in_rank(worker, peers)
        assert kinds(await worker.deliver(first, 0)) == [Acknowledgement]
        await trio.sleep(VERDICT_SECONDS - 5)
        (answer,) = await worker.deliver(second, 0)
        assert isinstance(answer.message, Acknowledgement) and answer.sender == str(first.id)
        await trio.sleep(5)
        (answer,) = await worker.announce(second, 0)
        assert isinstance(answer.message, Acknowledgement) and answer.sender == str(second.id)


async def test_a_validator_takes_over_from_one_that_takes_no_files() -> None:
    async with submitting(*TWO) as (_, peers, worker, _):
        first, second = in_rank(worker, peers)
        part_of(first).blobs.inbox = None
        assert kinds(await worker.deliver(second, 0)) == [Acknowledgement]


async def test_showing_every_file_to_all_validators_brings_one_verdict_by_the_first() -> None:
    """Three validators: the same as a worker gets that asks them in order of rank."""
    firsts: list[str] = []
    async with submitting(*THREE, thresholds=ONCE) as (_, peers, worker, said):
        for number in range(4):
            ranks = in_rank(worker, peers, number)
            firsts.append(str(ranks[0].id))
            answers = [await worker.deliver(each, number) for each in reversed(ranks)]
            assert {envelope.sender for answer in answers for envelope in answer} == {firsts[-1]}
            await trio.sleep(10)
            (verdict,) = await worker.announce(ranks[-1], number)
            assert isinstance(verdict.message, Verdict) and verdict.sender == firsts[-1]
    judged = said.named("validator.verdict")
    assert len(judged) == len(firsts) == 4 and len(set(firsts)) > 1


async def test_a_worker_that_repeats_an_announcement_takes_no_file_from_a_second_opinion() -> None:
    """It has had no receipt of the first validator, which was stopped, and asks the second."""
    always = Thresholds(second_share=1.0, measured_tokens=1)
    async with submitting(*TWO, thresholds=always, speed=200.0) as (
        simulation,
        peers,
        worker,
        said,
    ):
        first, second = in_rank(worker, peers)
        judged = simulation.expect("validator.verdict", [first.name])
        assert kinds(await worker.deliver(first, 0)) == [Acknowledgement]
        assert await simulation.meet(judged, 60)
        await trio.sleep(1)
        assert kinds(await worker.deliver(second, 0)) == [Verdict]
        await trio.sleep(60)
    verdicts = said.named("validator.verdict")
    assert [each["second"] for each in verdicts] == [False, True]
    assert {each["outcome"] for each in verdicts} == {"accepted"}
