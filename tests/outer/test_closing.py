"""When a round closes, and who closes it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from peers.outer.gathering import Gathered, ranking
from peers.outer.sharing import TAKEOVER_SECONDS
from swarm.wire.manifest import Outer

OUTER = Outer(quorum=2, grace_seconds=30.0, deadline_seconds=600.0)
NAMES = ("a", "b", "c")


def due(ready: dict[str, float], present: Sequence[str]) -> float:
    return Gathered(ready, present, began=0.0).due_at(OUTER)


def test_a_round_closes_with_everyone_or_after_the_grace_window() -> None:
    assert due({}, NAMES) == math.inf
    assert due({"a": 50.0}, NAMES) == 600.0  # no quorum: the deadline
    assert due({"a": 50.0, "b": 60.0}, NAMES) == 90.0
    assert due({"a": 50.0, "b": 60.0, "c": 70.0}, NAMES) == 70.0
    assert due({"a": 50.0}, ["a"]) == 50.0  # alone
    assert due({"a": 700.0}, NAMES) == 700.0  # the deadline has passed
    assert due({"a": 50.0, "gone": 60.0}, ["a", "b"]) == 90.0  # a dead trainer's work counts


def test_the_next_in_rank_takes_over() -> None:
    ready = dict.fromkeys(NAMES, 10.0)
    ranked = ranking(NAMES, "run", 7)
    times = [Gathered(ready, NAMES, 0.0).closes_at(OUTER, ranked, name) for name in ranked]
    assert times == [10.0, 10.0 + TAKEOVER_SECONDS, 10.0 + 2 * TAKEOVER_SECONDS]
    without_first = Gathered(ready, ranked[1:], 0.0)
    assert without_first.closes_at(OUTER, ranked, ranked[1]) == 10.0
    assert {ranking(NAMES, "run", round)[0] for round in range(20)} == set(NAMES)


@given(
    ready=st.dictionaries(st.sampled_from("abcde"), st.floats(0, 5000)),
    present=st.sets(st.sampled_from("abcde"), min_size=1),
    began=st.floats(0, 5000),
)
def test_no_round_with_a_contribution_waits_for_ever(
    ready: dict[str, float], present: set[str], began: float
) -> None:
    at = Gathered(ready, present, began).due_at(OUTER)
    first = min(ready.values(), default=math.inf)
    assert (at == math.inf) == (not ready)
    if ready:
        assert first <= at <= max(*ready.values(), began + OUTER.deadline_seconds)
