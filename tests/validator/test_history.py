"""The draw, copies and pace, which are reasons to recompute a submission, never to refuse it."""

from __future__ import annotations

import pytest

from peers.validator.cases import Outcome, verdict_on
from peers.validator.checks.base import run
from peers.validator.checks.history import Duplicates, History, Pace, speed
from peers.validator.draws import prefill_wanted
from tests.validator.test_queue import case


def test_the_draw_follows_the_secret_and_the_share() -> None:
    digests = [number.to_bytes(32, "big") for number in range(2000)]
    drawn = [prefill_wanted(b"secret", digest, 0.25) for digest in digests]
    assert 400 < sum(drawn) < 600
    assert drawn != [prefill_wanted(b"another", digest, 0.25) for digest in digests]
    assert all(prefill_wanted(b"secret", digest, 1.0) for digest in digests)
    assert not any(prefill_wanted(b"secret", digest, 0.0) for digest in digests)


def group(name: str) -> bytes:
    return name.encode().ljust(32)


FIRST = [group(name) for name in "abcd"]


def test_copies_are_counted_but_chance_is_not() -> None:
    duplicates = Duplicates()
    assert duplicates.seen(FIRST, "alice", (0, 3)) == 0
    assert duplicates.seen(FIRST, "alice", (0, 3)) == 0  # judged again
    assert duplicates.seen(FIRST, "mallory", (0, 3)) == 4
    assert duplicates.seen([*FIRST[:3], group("x")], "mallory", (0, 4)) == 3
    assert duplicates.seen([FIRST[0], *map(group, "efg")], "bob", (0, 3)) == 0
    assert duplicates.seen(FIRST, "alice", (0, 3)) == 0  # whoever copied it since


def test_duplicates_forget_the_oldest() -> None:
    duplicates = Duplicates(groups_max=4)
    duplicates.seen([group("a")], "alice", (0, 1))
    duplicates.seen([group(name) for name in "bcde"], "alice", (0, 0))
    assert duplicates.seen([group("b")], "mallory", (0, 1)) == 0
    assert duplicates.seen([group("a")], "mallory", (0, 1)) == 1


def test_groups_are_forgotten_with_their_policy() -> None:
    duplicates = Duplicates()
    for step in range(3):
        duplicates.seen([group(f"{step}")], "alice", (1, step))
    duplicates.seen([group("older")], "alice", (0, 9))
    duplicates.forget_before((1, 1))
    assert duplicates.seen([group("older")], "mallory", (1, 2)) == 0
    assert duplicates.seen([group("0")], "mallory", (1, 2)) == 0
    assert duplicates.seen([group("1")], "mallory", (1, 2)) == 1
    assert duplicates.seen([group("0")], "bob", (1, 2)) == 1, "the copy is still remembered"


def test_pace_counts_from_the_first_submission() -> None:
    pace = Pace()
    assert pace.observe(10_000, now=5.0) == 0.0
    assert pace.observe(100, now=5.1) == 100.0
    assert pace.observe(100, now=9.0) == 50.0


def history(worker: str, duplicates: Duplicates, pace: Pace, tokens: int = 10) -> History:
    return History(worker, (0, 3), FIRST, tokens, duplicates, pace, now=100.0)


def test_a_copy_is_recomputed_and_not_refused() -> None:
    duplicates = Duplicates()
    assert not history("alice", duplicates, Pace()).is_striking
    copied = history("mallory", duplicates, Pace())
    assert copied.is_striking
    assert not run([speed], copied, Outcome()).failed


@pytest.mark.parametrize(("tokens", "outcome"), [(10, "accepted"), (2_000_000, "quarantined")])
def test_implausible_speed_is_recomputed_and_earns_no_credit(tokens: int, outcome: str) -> None:
    pace = Pace()
    pace.observe(1, 99.0)
    found = history("mallory", Duplicates(), pace, tokens)
    assert found.is_striking == (outcome == "quarantined")
    judged = Outcome(rewards=[[1.0, 0.0]], environments=[0])
    run([speed], found, judged)
    verdict = verdict_on("mallory" * 8, case(0).submission, judged, 0)
    assert verdict.outcome == outcome
    assert bool(verdict.rewards) == (outcome == "accepted")
