"""The pool of accepted submissions, and the labels of their groups."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.trainer.pool import Accepted, GroupLabel, Pool, SubmissionKey, label_groups
from swarm.wire.manifest import EnvironmentReference
from tests.orders import verdict

LABELS: st.SearchStrategy[list[GroupLabel]] = st.lists(
    st.sampled_from(["kept", "no_spread", "too_hard", "quarantined"]), max_size=4
)


def accepted(digest: int, labels: list[GroupLabel], *, step: int = 0, refill: bool) -> Accepted:
    judged = verdict(digest, step=step, rewards=[[0.0, 1.0]] * len(labels))
    fill = "refill" if refill else "drop"
    return Accepted(judged.submission, judged, "file", labels, fill)  # type: ignore[arg-type]


SUBMISSIONS = st.lists(
    st.builds(accepted, st.integers(0, 20), LABELS, step=st.integers(0, 3), refill=st.booleans()),
    max_size=12,
)


# --- the pool --------------------------------------------------------------------------------


@given(SUBMISSIONS, st.lists(st.integers(0, 20), max_size=6))
def test_it_counts_the_groups_that_it_holds(added: list[Accepted], removed: list[int]) -> None:
    pool = Pool()
    for each in added:
        pool.add(each)
    for digest in removed:
        pool.remove(bytes([digest]) * 32)
    held = pool.oldest_first()
    assert len(pool) == len(held) == len({each.digest for each in held})
    assert pool.groups == sum(each.counted for each in held)
    assert all("quarantined" not in each.labels or each.counted < len(each.labels) for each in held)


@given(SUBMISSIONS, st.integers(0, 20))
def test_a_batch_is_the_oldest_submissions_and_no_more_than_needed(
    added: list[Accepted], wanted: int
) -> None:
    pool = Pool()
    for each in added:
        pool.add(each)
    before = pool.oldest_first()
    taken = pool.take(wanted)
    assert [*taken, *pool.oldest_first()] == before
    counted = [each.counted for each in taken]
    assert sum(counted) >= min(wanted, sum(each.counted for each in before))
    assert not taken or sum(counted[:-1]) < wanted


def test_with_refill_only_kept_groups_count() -> None:
    labels: list[GroupLabel] = ["kept", "no_spread", "kept"]
    assert accepted(1, labels, refill=True).counted == 2
    assert accepted(1, labels, refill=False).counted == 3


def test_two_files_for_the_same_work_have_one_key() -> None:
    first, second = (accepted(1, labels, refill=False) for labels in (["kept"], []))  # type: ignore[arg-type]
    assert SubmissionKey.of(first.verdict) == SubmissionKey.of(second.verdict)
    assert SubmissionKey.of(accepted(2, [], refill=False).verdict).number == 2


# --- labels ----------------------------------------------------------------------------------


def test_a_group_that_was_not_graded_is_never_kept() -> None:
    judged = verdict(rewards=[[1.0, 0.0], [1.0, 0.0]], quarantined=[1])
    assert label_groups(judged, bounds()) == ["kept", "quarantined"]


def bounds(**fields: Any) -> list[EnvironmentReference]:
    """A run's one environment, with these bounds."""
    return [EnvironmentReference(name="sort-digits", version="1", **fields)]


BOUNDS = bounds(accuracy_min=0.2, accuracy_max=0.8)


@pytest.mark.parametrize(
    ("rewards", "environments", "expected"),
    [
        ([1.0, 0.0, 1.0, 0.0], BOUNDS, "kept"),
        ([1.0, 1.0, 1.0, 1.0], BOUNDS, "no_spread"),
        ([0.0, 0.0], bounds(), "no_spread"),
        ([1.0, *[0.0] * 9], BOUNDS, "too_hard"),
        ([0.0, *[1.0] * 9], BOUNDS, "too_easy"),
        ([0.0, *[1.0] * 9], bounds(), "kept"),
    ],
)
def test_spread_and_accuracy(
    rewards: list[float], environments: list[EnvironmentReference], expected: str
) -> None:
    assert label_groups(verdict(rewards=[rewards]), environments) == [expected]


def test_each_group_is_judged_by_its_own_environment() -> None:
    judged = verdict(rewards=[[1.0, *[0.0] * 9]] * 3, environments=[1, 0, 1])
    environments = bounds() + bounds(accuracy_min=0.2)
    assert label_groups(judged, environments) == ["too_hard", "kept", "too_hard"]


def test_groups_alive_through_their_length_only_are_told_apart() -> None:
    """With a length penalty nearly every group has a spread; the task's is what counts."""
    judged = verdict(
        rewards=[[0.99, 0.98], [0.9, -0.1], [0.5, 0.5]],
        task_means=[1.0, 0.5, 0.5],
        task_spreads=[0.0, 1.0, 0.0],
    )
    assert label_groups(judged, bounds()) == ["length_only", "kept", "no_spread"]
    assert label_groups(judged, bounds(spread="total")) == ["kept", "kept", "no_spread"]
    # Accuracy is the task's too: 0.4 with the penalty, 0.5 without.
    assert label_groups(judged, bounds(accuracy_min=0.45))[1] == "kept"
