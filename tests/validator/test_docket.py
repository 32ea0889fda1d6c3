"""The docket: which submission fills each slot, and which verdicts are known."""

from __future__ import annotations

from typing import Literal

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from peers.validator.cases import Slot, slot_of
from peers.validator.docket import TURNED_DOWN_KEPT, Docket
from peers.validator.verdicts import bet_once
from swarm.run.heard_verdicts import verdict_in
from swarm.run.work import ORDERS_KEPT
from swarm.wire.envelope import Envelope
from swarm.wire.messages import Acknowledgement, Checkpoint, Evidence, StepOrder, Verdict
from tests.network.harness import identity, sealed
from tests.orders import policy, step_order
from tests.orders import verdict as accepted

HERE, WORKER = identity(1), identity(3)
Word = Literal["accepted", "refused", "quarantined"]


def verdict(
    number: int, *, step: int = 5, outcome: Word = "accepted", by: int = 1, recomputed: int = 0
) -> Envelope:
    """On submission `number`, by the validator with identity `by`."""
    said = accepted(
        number, submission=blake3(b"%d %d" % (step, number)).digest(), worker=WORKER.peer_id,
        step=step, policy=step, outcome=outcome, log_index=0, evidence=Evidence(tokens=recomputed),
    )  # fmt: skip
    return sealed(identity(by), said, "owner/run")


def key_of(envelope: Envelope) -> tuple[str, bytes]:
    return (verdict_in(envelope).worker, verdict_in(envelope).submission)


def slot(number: int, step: int = 5) -> Slot:
    return Slot(WORKER.peer_id, 0, step, number)


def order(step: int, revision: int = 0) -> StepOrder:
    return step_order(step, revision=revision, run_digest=bytes(32), run_version=1)


def signed(message: StepOrder) -> Envelope:
    return sealed(identity(9), message, "owner/run")


def checkpoint(step: int, lineage: int = 0) -> Checkpoint:
    return Checkpoint(reference=policy(step, lineage), total_bytes=1)


@pytest.mark.parametrize(
    ("outcome", "recomputed", "counts"),
    [
        ("accepted", 0, True),
        ("refused", 0, False),
        ("refused", 9, True),
        ("quarantined", 0, False),
        ("quarantined", 9, False),
    ],
)
def test_acceptances_and_recomputed_refusals_elsewhere_are_as_good_as_ones_own(
    outcome: Word, recomputed: int, counts: bool
) -> None:
    docket = Docket(HERE.peer_id)
    heard = verdict(0, outcome=outcome, by=2, recomputed=recomputed)
    docket.hear(heard)
    assert (docket.verdict_on(key_of(heard)) is not None) == counts
    assert (docket.settled_elsewhere(key_of(heard)) is not None) == counts
    assert docket.taken(slot(0)) is not None and not docket.is_judged_here(key_of(heard))


def test_a_recomputed_refusal_elsewhere_overrules_ones_own_acceptance() -> None:
    docket = Docket(HERE.peer_id)
    own, other = verdict(0), verdict(0, outcome="refused", by=2, recomputed=9)
    assert docket.hear(own) == []
    assert docket.verdict_on(key_of(own)) is own and docket.settled_elsewhere(key_of(own)) is None
    assert docket.hear(other) == [], "the acceptance rests on no recomputation"
    assert docket.verdict_on(key_of(own)) is other
    checked = verdict(0, by=3, recomputed=9)
    assert docket.hear(checked) == [(identity(2).peer_id, identity(3).peer_id)]
    assert docket.hear(checked) == [], "the alarm is raised once"


def test_the_first_file_fills_a_slot() -> None:
    docket = Docket(HERE.peer_id)
    docket.fill(slot(0), b"first")
    docket.fill(slot(0), b"second")
    docket.hear(verdict(0))
    assert docket.taken(slot(0)) == (b"first", None)
    assert slot(1).before == slot(0) == slot_of(WORKER.peer_id, verdict_in(verdict(0)))


def test_a_slot_keeps_the_newest_receipt_of_its_file() -> None:
    docket, judged = Docket(HERE.peer_id), verdict(0)
    digest = verdict_in(judged).submission
    said = Acknowledgement(submission=digest, worker=WORKER.peer_id, step=5)
    acknowledged = sealed(identity(2), said, "owner/run")
    for receipt in (acknowledged, judged):
        docket.hear(receipt)
        assert docket.taken(slot(0)) == (digest, receipt)


def test_the_newest_order_of_a_step_counts() -> None:
    docket = Docket(HERE.peer_id)
    for revision in (1, 2, 0):
        docket.orders.take(signed(order(7, revision)))
    assert docket.orders.find(0, 7) == order(7, 2)


@given(st.lists(st.integers(0, 3 * ORDERS_KEPT), max_size=4 * ORDERS_KEPT))
def test_orders_and_refusals_are_bounded(steps: list[int]) -> None:
    docket = Docket(HERE.peer_id)
    for step in steps:
        docket.orders.take(signed(order(step)))
    newest = sorted(set(steps))[-ORDERS_KEPT:]
    held = {step for step in steps if docket.orders.find(0, step) is not None}
    assert len(held) <= ORDERS_KEPT and held >= set(newest[-1:])
    refusal = verdict(0)
    for number in range(TURNED_DOWN_KEPT + 1):
        docket.turn_down((WORKER.peer_id, b"%d" % number), refusal)
    assert docket.answer_to((WORKER.peer_id, b"0")) is None
    assert docket.answer_to((WORKER.peer_id, b"1")) is refusal


def test_what_can_no_longer_be_trained_on_is_forgotten() -> None:
    docket = Docket(HERE.peer_id)
    given_here = {step: verdict(0, step=step) for step in (3, 5)}
    for step, own in given_here.items():
        docket.hear(own)
        docket.hear(verdict(1, step=step, by=2))
    newest = checkpoint(7)
    assert docket.too_old(newest, oldest_step=5) == [key_of(given_here[3])]
    docket.forget_older(newest, oldest_step=5)
    assert docket.judged_here() == [key_of(given_here[5])]
    for number in (0, 1):
        assert docket.taken(slot(number, 3)) is None and docket.taken(slot(number)) is not None
    assert docket.settled_elsewhere(key_of(verdict(1, step=3, by=2))) is None
    assert docket.too_old(checkpoint(1, lineage=1), oldest_step=0) == [key_of(given_here[5])]


# --- evidence of several validators ------------------------------------------------------------

OWN = Evidence(tokens=100, mismatches=2, sampler=[5], policy=[6], text=[7], selection=[8])
WITHOUT_BETS = Evidence(tokens=100, mismatches=2)


@pytest.mark.parametrize(
    ("word", "recomputed", "expected"),
    [
        ("accepted", 50, WITHOUT_BETS),
        ("accepted", 0, OWN),
        ("refused", 50, OWN),
        ("quarantined", 0, OWN),
    ],
)
def test_evidence_that_another_validator_has_found_is_not_bet_on_again(
    word: Word, recomputed: int, expected: Evidence
) -> None:
    """Whether the verdict is a first one, a second opinion or an audit."""
    docket = Docket(HERE.peer_id)
    other = verdict(0, by=2, outcome=word, recomputed=recomputed)
    docket.hear(other)
    others: list[Verdict] = list(docket.opinions_on(key_of(other)).values())
    assert bet_once(OWN, "accepted", others) == expected
    assert bet_once(OWN, "accepted", []) == OWN, "a validator alone"
