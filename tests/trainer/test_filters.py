from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.trainer.filters import (
    KEEP_RATE_MIN,
    SMOOTHING,
    GroupLabel,
    KeepRate,
    groups_to_ask_for,
    label_groups,
)
from swarm.wire.manifest import EnvironmentReference
from swarm.wire.messages import Verdict


def verdict(
    rewards: list[list[float]],
    means: list[float] | None = None,
    spreads: list[float] | None = None,
) -> Verdict:
    return Verdict(
        submission=bytes(32),
        size_bytes=1,
        worker="Q" * 46,
        lineage=0,
        step=0,
        policy=0,
        number=0,
        outcome="accepted",
        rewards=rewards,
        task_means=means or [],
        task_spreads=spreads or [],
    )


def test_a_group_that_was_not_graded_is_never_kept() -> None:
    judged = msgspec.structs.replace(verdict([[1.0, 0.0], [1.0, 0.0]]), quarantined=[1])
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
    assert label_groups(verdict([rewards]), environments) == [expected]


def test_each_group_is_judged_by_its_own_environment() -> None:
    judged = msgspec.structs.replace(verdict([[1.0, *[0.0] * 9]] * 3), environments=[1, 0, 1])
    environments = bounds() + bounds(accuracy_min=0.2)
    assert label_groups(judged, environments) == ["too_hard", "kept", "too_hard"]


def test_groups_alive_through_their_length_only_are_told_apart() -> None:
    """With a length penalty nearly every group has a spread; the task's is what counts."""
    judged = verdict(
        [[0.99, 0.98], [0.9, -0.1], [0.5, 0.5]], means=[1.0, 0.5, 0.5], spreads=[0.0, 1.0, 0.0]
    )
    assert label_groups(judged, bounds()) == ["length_only", "kept", "no_spread"]
    assert label_groups(judged, bounds(spread="total")) == ["kept", "kept", "no_spread"]
    # Accuracy is the task's too: 0.4 with the penalty, 0.5 without.
    assert label_groups(judged, bounds(accuracy_min=0.45))[1] == "kept"


@given(st.lists(st.lists(st.sampled_from(["kept", "no_spread"]), min_size=1), min_size=1))
def test_the_keep_rate_is_an_average_without_a_beginning(shares: list[list[GroupLabel]]) -> None:
    """Weighted by (1 − s)^age; bounded below, so that what is asked for is bounded too."""
    rate = KeepRate()
    assert rate.value == 1.0
    for some in shares:
        rate.observe(some)
    weights = [(1 - SMOOTHING) ** age for age in range(len(shares))][::-1]
    values = [some.count("kept") / len(some) for some in shares]
    expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert rate.value == pytest.approx(max(KEEP_RATE_MIN, expected))


@given(st.integers(-50, 500), st.floats(KEEP_RATE_MIN, 1.0), st.integers(0, 500))
def test_what_is_asked_for_makes_up_what_is_missing(missing: int, rate: float, coming: int) -> None:
    asked = groups_to_ask_for(missing, rate, coming)
    assert asked >= 0
    if asked:
        assert (asked + coming) * rate >= missing - 1e-6
        assert (asked - 1 + coming) * rate < missing
    else:
        assert math.ceil(missing / rate - 1e-9) <= coming


def test_nothing_left_out_asks_for_exactly_what_is_missing() -> None:
    assert groups_to_ask_for(32, 1.0, 0) == 32
    assert groups_to_ask_for(32, 0.25, 28) == 100
