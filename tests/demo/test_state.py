"""What the demo makes of its peers' events."""

from __future__ import annotations

import pytest

from peers.demo.view import PlainLines, compose
from tests.demo.recorded import SECONDS_PER_STEP, TRAINING_SINCE, fresh, identifier, say, trained


def test_steps_rewards_and_time_left() -> None:
    state = trained(fresh(steps=100), 40)
    assert state.step == 40
    assert [step for step, _ in state.rewards()] == list(range(40))
    assert state.seconds_left() == pytest.approx(60 * SECONDS_PER_STEP)
    assert state.tokens_per_second(TRAINING_SINCE + 40 * SECONDS_PER_STEP) == 3000.0
    assert state.phase == "training"
    assert state.marks == {"preparing": 0.0, "joining": 8.0, "training": TRAINING_SINCE}


def test_verdicts_are_counted_by_what_failed() -> None:
    state = trained(fresh(), 10)
    say(state, "validator", "validator.verdict", 1.0, outcome="quarantined", failed="speed")
    say(state, "validator", "validator.verdict", 1.0, outcome="refused")
    assert dict(state.counts) == {
        "accepted": 20,
        "proof_exponents": 1,
        "quarantined": 1,
        "refused": 1,
    }
    assert state.refusals[0].figure == 41.25 and state.refusals[0].worker == "inference-3"


def test_an_eviction_is_remembered_once_and_outlasts_later_events() -> None:
    state = trained(fresh(), 10)
    for name in ("relay-1", "relay-2"):
        say(
            state,
            name,
            "membership.peer_evicted",
            50.0,
            remote=identifier("inference-3"),
            reason="another word for it",
        )
    say(state, "inference-3", "membership.admitted", 51.0)
    state.process_finished("inference-3")
    assert state.evicted == {"inference-3": "pooled mismatch"}
    assert state.peers[identifier("inference-3")].state == "evicted"
    assert sum("evicted" in note.text for note in state.notes) == 1


def test_a_guest_gets_a_row_of_its_own() -> None:
    state = fresh()
    guest = identifier("stranger")
    for trusted in ("trainer", "validator"):
        say(state, trusted, "membership.peer_admitted", 3.0, remote=guest, roles=["inference"])
    row = state.peers[guest]
    assert (row.name, row.role, row.own, row.state) == ("guest-1", "inference", False, "live")
    say(state, "validator", "validator.verdict", 4.0, worker=guest, outcome="accepted", step=7)
    assert (row.step, row.doing) == (7, "judged accepted")
    say(state, "trainer", "membership.peer_suspected", 5.0, remote=guest)
    assert row.state == "suspected"
    say(state, "trainer", "membership.peer_returned", 5.0, remote=guest)
    assert row.state == "live"


def test_answers_are_shown_before_during_and_after() -> None:
    state = fresh()
    before = [{"question": "21>", "text": "21\x1b[2J", "reward": 0.0}]
    state.evaluated("before", {"sampled": 0.2, "greedy": 0.5, "answers": before}, 1.0)
    state.show("step 3", [{"question": "31>", "text": "13", "reward": 1.0}], 2.0)
    after = [{"question": "21>", "text": "12", "reward": 1.0}]
    state.evaluated("after", {"sampled": 0.2, "greedy": 0.5, "answers": after}, 3.0)
    assert [(each.policy, each.right) for each in state.answers] == [
        ("before", False),
        ("step 3", True),
        ("after", True),
    ]
    assert [each.text for each in state.measured["after"]] == ["12"]
    printed = [line for line in PlainLines(state).lines() if "→" in line]
    assert printed[1:] == ["step 3: 31> → 13 (right)", "after: 21> → 12 (right)"]
    assert "\x1b" not in printed[0] and printed[0].endswith("(wrong)")
    screen = [line.plain for line in compose(state, 4.0, 100, 40)]
    assert any("step 3" in line and "13" in line for line in screen)
