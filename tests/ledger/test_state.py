from __future__ import annotations

import random
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from swarm.ledger.entries import Consumed, Entry, Evicted, Judged, Reinstated
from swarm.ledger.record import Rules
from swarm.ledger.state import Authority, LedgerState, Record, ledger_state
from swarm.wire.messages import Eviction, Evidence, Reinstatement
from tests.ledger.harness import ALICE, BOB, OWNER, TRAINER, WORKER, sealed

VALIDATORS = [ALICE.peer_id, BOB.peer_id]
TRUSTED = [TRAINER.peer_id, *VALIDATORS]
RULES = Rules(stake_steps=10, hold_steps=15, safety=3.0, observes=True)
AUTHORITY = Authority([OWNER.peer_id], VALIDATORS, TRUSTED, RULES, "owner/run")


def state(logs: dict[str, list[Entry]], seed: int = 0) -> LedgerState:
    records = [
        Record(owner, index, entry)
        for owner, entries in logs.items()
        for index, entry in enumerate(entries)
    ]
    shuffled = records + records[: seed % 5]
    random.Random(seed).shuffle(shuffled)
    return ledger_state(shuffled, AUTHORITY)


def judged(number: int, outcome: str = "accepted", **changes: Any) -> Judged:
    refused = outcome == "refused"
    return Judged(
        **{
            "submission": number.to_bytes(32, "big"),
            "worker": WORKER.peer_id,
            "lineage": 0,
            "step": 0,
            "policy": 0,
            "number": number,
            "outcome": outcome,
            "groups": 0 if refused else 2,
            "samples": 0 if refused else 16,
            "rewards_digest": bytes(32),
            "size_bytes": 100,
            "tokens": 10,
            **changes,
        }
    )


def consumed(number: int, *outcomes: Any, step: int = 0) -> Consumed:
    return Consumed(step=step, submission=number.to_bytes(32, "big"), outcomes=list(outcomes))


FIRST = (1).to_bytes(32, "big")
FAULT = judged(1, "refused", failed="tokens", proven_fault=True)


def test_the_first_in_rank_decides() -> None:
    found = state({BOB.peer_id: [judged(1)], ALICE.peer_id: [judged(1, size_bytes=99)]})
    assert found.judges[FIRST] == ALICE.peer_id
    assert found.verdicts[FIRST].size_bytes == 99
    refused: list[Entry] = [judged(1, "refused", evidence=Evidence(tokens=9))]
    for accepted in (judged(1), judged(1, evidence=Evidence(tokens=9))):
        found = state({ALICE.peer_id: [accepted], BOB.peer_id: refused})
        assert found.judges[FIRST] == BOB.peer_id
        assert not found.credits
        assert found.totals[WORKER.peer_id].refused == 1


def test_a_refusal_without_recomputation_binds_only_its_validator() -> None:
    found = state({ALICE.peer_id: [judged(1, "refused", failed="stale")], BOB.peer_id: [judged(1)]})
    assert found.judges[FIRST] == BOB.peer_id and found.credits[FIRST].groups == 2


def test_a_proven_fault_beats_an_acceptance() -> None:
    found = state({ALICE.peer_id: [judged(1)], BOB.peer_id: [FAULT]})
    assert found.verdicts[FIRST] == FAULT
    assert not found.credits


def test_what_was_trained_on_stays_accepted_and_credited() -> None:
    logs: dict[str, list[Entry]] = {
        ALICE.peer_id: [FAULT],
        BOB.peer_id: [judged(1)],
        TRAINER.peer_id: [consumed(1, "consumed", "zero-advantage")],
    }
    found = state(logs)
    assert found.judges[FIRST] == BOB.peer_id
    assert found.credits[FIRST].groups == 2


def test_a_fault_still_counts_until_a_step_takes_a_group() -> None:
    logs: dict[str, list[Entry]] = {
        ALICE.peer_id: [judged(1)],
        BOB.peer_id: [FAULT],
        TRAINER.peer_id: [consumed(1, "stale", "carried")],
    }
    assert state(logs).verdicts[FIRST] == FAULT
    logs[TRAINER.peer_id].append(consumed(1, "stale", "consumed", step=1))
    assert state(logs).verdicts[FIRST] == judged(1)


def test_every_outcome_and_quarantine_are_credited() -> None:
    outcomes = ["consumed", "zero-advantage", "stale", "carried", "unreadable"]
    logs: dict[str, list[Entry]] = {
        ALICE.peer_id: [*(judged(number) for number in range(5)), judged(5, "quarantined")],
        TRAINER.peer_id: [consumed(n, outcome, outcome) for n, outcome in enumerate(outcomes)],
    }
    total = state(logs).totals[WORKER.peer_id]
    assert (total.accepted, total.quarantined, total.groups, total.samples) == (5, 1, 12, 96)


def test_a_submission_is_credited_once() -> None:
    found = state({ALICE.peer_id: [judged(1), judged(1)], BOB.peer_id: [judged(1)]})
    assert found.totals[WORKER.peer_id].groups == 2


def test_a_carried_group_is_consumed_in_the_end() -> None:
    logs: dict[str, list[Entry]] = {
        ALICE.peer_id: [judged(1)],
        TRAINER.peer_id: [consumed(1, "carried", "consumed"), consumed(1, "consumed", "consumed")],
    }
    assert state(logs).consumed[FIRST] == ["consumed", "consumed"]


def test_only_who_may_say_it_is_heard() -> None:
    found = state(
        {WORKER.peer_id: [judged(1), consumed(1, "consumed")], TRAINER.peer_id: [judged(2)]}
    )
    assert not found.verdicts
    assert not found.consumed


def test_two_submissions_with_one_number_are_credited_once() -> None:
    """A worker hands the same groups to two validators as two files."""
    second = judged(1, submission=(2).to_bytes(32, "big"))
    logs: dict[str, list[Entry]] = {ALICE.peer_id: [judged(1)], BOB.peer_id: [second]}
    found = state(logs)
    assert list(found.credits) == [FIRST], "the validator first in rank decides"
    assert found.totals[WORKER.peer_id].samples == 16
    logs[TRAINER.peer_id] = [consumed(2, "consumed"), consumed(1, "stale")]
    assert list(state(logs).credits) == [second.submission], "a step has taken the other one"


def test_who_hands_in_anothers_file_harms_only_himself() -> None:
    """Its header names the worker, so a thief's copy is a proven fault: the thief's."""
    thief = TRAINER.peer_id
    logs: dict[str, list[Entry]] = {
        ALICE.peer_id: [judged(1, "refused", failed="header", proven_fault=True, worker=thief)],
        BOB.peer_id: [judged(1)],
    }
    found = state(logs)
    assert found.verdicts[FIRST].worker == WORKER.peer_id
    assert found.credits[FIRST].worker == WORKER.peer_id
    assert (found.totals[thief].refused, found.totals[WORKER.peer_id].refused) == (1, 0)


def evicted(number: int, at: float = 0.0) -> Evicted:
    name = number.to_bytes(32, "big")
    message = Eviction(
        peer=WORKER.peer_id, reason="a lie", submission=name, figure=1.0, threshold=0.0
    )
    envelope = sealed(ALICE, message, "owner/run", at=at)
    return Evicted(peer=WORKER.peer_id, reason="a lie", submission=name, envelope=envelope.raw)


def reinstated(at: float) -> Reinstated:
    envelope = sealed(OWNER, Reinstatement(peer=WORKER.peer_id), "owner/run", at=at)
    return Reinstated(peer=WORKER.peer_id, envelope=envelope.raw)


def total(logs: dict[str, list[Entry]]) -> tuple[int, int, int]:
    found = state(logs).totals[WORKER.peer_id]
    return found.final, found.held, found.void


def test_credit_is_held_for_the_window_and_then_final() -> None:
    log: list[Entry] = [judged(step, step=step) for step in range(20)]
    assert total({ALICE.peer_id: log}) == (50, 150, 0)
    found = ledger_state([Record(ALICE.peer_id, 0, log[0])], AUTHORITY, newest=(0, 15))
    assert found.totals[WORKER.peer_id].final == 10, "others' work passes the window too"


def test_an_eviction_voids_what_is_held_and_a_reinstatement_restores_it() -> None:
    log: list[Entry] = [judged(step, step=step) for step in range(20)]
    log += [judged(20, "quarantined", step=19), evicted(18), judged(21, step=20)]
    assert total({ALICE.peer_id: log}) == (60, 30, 130), "from step 9 on"
    log += [evicted(19, at=5.0)]
    assert total({ALICE.peer_id: log}) == (60, 40, 120), "the newest eviction counts"
    log += [reinstated(at=4.0)]
    assert total({ALICE.peer_id: log})[2] == 120, "it came before"
    assert total({ALICE.peer_id: log, BOB.peer_id: [reinstated(at=6.0)]}) == (60, 160, 0)


def test_only_the_owner_reinstates_and_only_trusted_peers_evict() -> None:
    log: list[Entry] = [judged(0), judged(1)]
    message = Eviction(peer=WORKER.peer_id, reason="-", submission=FIRST, figure=1.0, threshold=0.0)
    forged = sealed(WORKER, message, "owner/run").raw
    assert (
        total({ALICE.peer_id: [*log, msgspec.structs.replace(evicted(1), envelope=forged)]})[2] == 0
    )
    pardon = sealed(ALICE, Reinstatement(peer=WORKER.peer_id), "owner/run", at=9.0).raw
    by_another = msgspec.structs.replace(reinstated(1.0), envelope=pardon)
    assert total({ALICE.peer_id: [*log, evicted(1), by_another]})[2] == 20


def recomputed(number: int, outcome: str = "accepted", **changes: Any) -> Judged:
    return judged(number, outcome, evidence=Evidence(tokens=10), **changes)


def test_a_recomputed_refusal_earns_nothing_even_if_trained_on_and_costs_a_fine() -> None:
    honest: list[Entry] = [recomputed(step, step=step) for step in range(9)]
    fake = judged(9, step=9, share=0.5)
    audit = recomputed(9, "refused", step=9, share=0.5, failed="sampling")
    logs: dict[str, list[Entry]] = {ALICE.peer_id: [*honest, fake]}
    assert total(logs) == (0, 100, 0)
    logs[ALICE.peer_id].append(audit)
    logs[TRAINER.peer_id] = [consumed(9, "consumed", "consumed")]
    found = state(logs)
    assert found.verdicts[audit.submission] == audit
    assert total(logs) == (0, 40, 50), "a fine of (3/0.5 - 1) times 10 tokens, the newest first"
    assert found.works[WORKER.peer_id].stake(9, RULES) == 90 - 50


def test_a_stake_is_what_was_recomputed_in_the_window() -> None:
    log: list[Entry] = [recomputed(0, step=0), judged(1, step=5), recomputed(2, step=5)]
    log += [recomputed(3, "quarantined", step=6), recomputed(4, step=6, worker=BOB.peer_id)]
    work = state({ALICE.peer_id: log}).works[WORKER.peer_id]
    assert work.stake(9, RULES) == 20
    assert work.stake(10, RULES) == 10, "steps 1 to 10"
    assert work.stake(15, RULES) == 0
    assert state({ALICE.peer_id: log}).totals[WORKER.peer_id].verified == 20


ENTRIES = st.one_of(
    st.builds(
        judged,
        st.integers(0, 3),
        st.sampled_from(["accepted", "refused", "quarantined"]),
        proven_fault=st.booleans(),
        step=st.integers(0, 30),
        share=st.sampled_from([0.1, 0.5, 1.0]),
        evidence=st.sampled_from([Evidence(), Evidence(tokens=10)]),
    ),
    st.builds(evicted, st.integers(0, 3), st.integers(0, 3)),
    st.builds(reinstated, st.integers(0, 3)),
    st.builds(
        lambda number, outcomes: consumed(number, *outcomes),
        st.integers(0, 3),
        st.lists(st.sampled_from(["consumed", "stale", "carried"]), max_size=3),
    ),
)


@given(
    st.dictionaries(st.sampled_from(TRUSTED), st.lists(ENTRIES, max_size=6)), st.integers(1, 10**6)
)
def test_any_interleaving_gives_the_same_state(logs: dict[str, list[Entry]], seed: int) -> None:
    calm, shuffled = state(logs, 0), state(logs, seed)
    assert calm == shuffled
    assert list(calm.credits) == list(shuffled.credits)
    assert list(calm.totals) == list(shuffled.totals)
    assert set(calm.standings) == set(calm.credits)
    for submission in calm.credits:
        assert calm.verdicts[submission].outcome != "refused"
