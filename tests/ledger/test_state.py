from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from swarm.ledger.entries import Consumed, Entry, Judged
from swarm.ledger.state import LedgerState, Record, is_disputed, ledger_state
from swarm.messages import Evidence
from tests.ledger.harness import ALICE, BOB, TRAINER, WORKER

VALIDATORS = [ALICE.peer_id, BOB.peer_id]
TRUSTED = [TRAINER.peer_id, *VALIDATORS]


def state(logs: dict[str, list[Entry]], seed: int = 0) -> LedgerState:
    records = [
        Record(owner, index, entry)
        for owner, entries in logs.items()
        for index, entry in enumerate(entries)
    ]
    shuffled = records + records[: seed % 5]
    random.Random(seed).shuffle(shuffled)
    return ledger_state(shuffled, validators=VALIDATORS, trusted=TRUSTED)


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
        {
            WORKER.peer_id: [judged(1), consumed(1, "consumed")],
            TRAINER.peer_id: [judged(2)],
        }
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


ENTRIES = st.one_of(
    st.builds(
        judged,
        st.integers(0, 3),
        st.sampled_from(["accepted", "refused", "quarantined"]),
        proven_fault=st.booleans(),
    ),
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
    for submission in calm.credits:
        assert calm.verdicts[submission].outcome != "refused"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(VALIDATORS),
            st.integers(0, 5),
            st.integers(0, 5),
            st.sampled_from(["accepted", "refused", "quarantined"]),
        ),
        max_size=6,
    ),
    st.dictionaries(st.integers(0, 5), st.sampled_from(["consumed", "stale", "zero-advantage"])),
)
def test_credits_that_nobody_disputes_need_no_trainers_log(
    verdicts: list[tuple[str, int, int, str]], outcomes: dict[int, str]
) -> None:
    logs: dict[str, list[Entry]] = {validator: [] for validator in VALIDATORS}
    for validator, submission, number, outcome in verdicts:
        digest = submission.to_bytes(32, "big")
        logs[validator].append(judged(number, outcome, submission=digest))
    records = [Record(who, i, entry) for who in logs for i, entry in enumerate(logs[who])]
    alone = state(logs)
    taken: list[Entry] = [consumed(name, outcome) for name, outcome in sorted(outcomes.items())]
    whole = state({**logs, TRAINER.peer_id: taken})
    if not is_disputed(records):
        assert (alone.verdicts, alone.judges, alone.credits) == (
            whole.verdicts,
            whole.judges,
            whole.credits,
        )
    else:
        assert len(alone.verdicts) < len(records) or len(alone.credits) < len(records)
