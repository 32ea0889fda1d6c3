"""Rank: a validator judges only what those before it in rank cannot."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from simnet.simulation import Peer, Simulation
from swarm.run.work import judges_of
from swarm.wire.envelope import Envelope
from swarm.wire.manifest import Thresholds
from swarm.wire.messages import Acknowledgement, AdmissionRefused, Verdict
from tests.validator.test_numbers import Hand, kinds, part_of, simulate

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


def test_a_worker_that_asks_a_later_validator_is_sent_to_the_first() -> None:
    async def test(simulation: Simulation, peers: dict[str, Peer], worker: Hand) -> None:
        first, second, third = in_rank(worker, peers)
        for later in (third, second):
            assert sent_to(await worker.deliver(later, 0), first)
        assert kinds(await worker.deliver(first, 0)) == [Acknowledgement]
        (answer,) = await worker.announce(second, 0)
        assert answer.sender == str(first.id), "it has judged or acknowledged it"
        await trio.sleep(10)

    said = simulate(test, "validator", "validator-2", "validator-3", thresholds=ONCE)
    assert len([event for event in said if event.name == "validator.verdict"]) == 1


def test_a_validator_takes_over_at_once_when_the_first_cannot_be_reached() -> None:
    async def test(simulation: Simulation, peers: dict[str, Peer], worker: Hand) -> None:
        first, second = in_rank(worker, peers)
        simulation.network.cut(first.id, second.id)
        assert kinds(await worker.deliver(second, 0)) == [Acknowledgement]

    simulate(test, "validator", "validator-2")


def test_a_validator_takes_over_when_the_first_had_its_time() -> None:
    """The worker may be unable to reach it, which only the worker knows."""

    async def test(simulation: Simulation, peers: dict[str, Peer], worker: Hand) -> None:
        first, second = in_rank(worker, peers)
        assert sent_to(await worker.deliver(second, 0), first)
        await trio.sleep(VERDICT_SECONDS - 5)
        assert sent_to(await worker.announce(second, 0), first)
        await trio.sleep(5)
        assert kinds(await worker.announce(second, 0)) == [Acknowledgement]

    simulate(test, "validator", "validator-2")


def test_a_validator_takes_over_when_the_verdict_of_the_first_is_late() -> None:
    async def test(simulation: Simulation, peers: dict[str, Peer], worker: Hand) -> None:
        first, second = in_rank(worker, peers)
        assert kinds(await worker.deliver(first, 0)) == [Acknowledgement]
        await trio.sleep(VERDICT_SECONDS - 5)
        (answer,) = await worker.deliver(second, 0)
        assert isinstance(answer.message, Acknowledgement) and answer.sender == str(first.id)
        await trio.sleep(5)
        (answer,) = await worker.announce(second, 0)
        assert isinstance(answer.message, Acknowledgement) and answer.sender == str(second.id)

    simulate(test, "validator", "validator-2", prefill_tokens_per_second=1.0)


def test_a_validator_takes_over_from_one_that_takes_no_files() -> None:
    async def test(simulation: Simulation, peers: dict[str, Peer], worker: Hand) -> None:
        first, second = in_rank(worker, peers)
        part_of(first).blobs.inbox = None
        assert kinds(await worker.deliver(second, 0)) == [Acknowledgement]

    simulate(test, "validator", "validator-2")


def test_showing_every_file_to_all_validators_brings_one_verdict_by_the_first() -> None:
    """Three validators: the same as a worker gets that asks them in order of rank."""
    firsts: list[str] = []

    async def test(simulation: Simulation, peers: dict[str, Peer], worker: Hand) -> None:
        for number in range(4):
            ranks = in_rank(worker, peers, number)
            firsts.append(str(ranks[0].id))
            answers = [await worker.deliver(each, number) for each in reversed(ranks)]
            assert {envelope.sender for answer in answers for envelope in answer} == {firsts[-1]}
            await trio.sleep(10)
            (verdict,) = await worker.announce(ranks[-1], number)
            assert isinstance(verdict.message, Verdict) and verdict.sender == firsts[-1]

    said = simulate(test, "validator", "validator-2", "validator-3", thresholds=ONCE)
    judged = [event for event in said if event.name == "validator.verdict"]
    assert len(judged) == len(firsts) == 4 and len(set(firsts)) > 1


def test_a_worker_that_repeats_an_announcement_takes_no_file_from_a_second_opinion() -> None:
    """It has had no receipt of the first validator, which was stopped, and asks the second."""

    async def test(simulation: Simulation, peers: dict[str, Peer], worker: Hand) -> None:
        first, second = in_rank(worker, peers)
        judged = simulation.expect("validator.verdict", [first.name])
        assert kinds(await worker.deliver(first, 0)) == [Acknowledgement]
        assert await simulation.meet(judged, 60)
        await trio.sleep(1)
        assert kinds(await worker.deliver(second, 0)) == [Verdict]
        await trio.sleep(60)

    said = simulate(
        test, "validator", "validator-2",
        thresholds=Thresholds(second_share=1.0, measured_tokens=1),
        prefill_tokens_per_second=200.0,
    )  # fmt: skip
    verdicts = [event.fields for event in said if event.name == "validator.verdict"]
    assert [each["second"] for each in verdicts] == [False, True]
    assert {each["outcome"] for each in verdicts} == {"accepted"}
