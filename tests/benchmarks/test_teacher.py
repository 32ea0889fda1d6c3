from __future__ import annotations

from benchmarks.commands import spread
from benchmarks.teacher import Climb, summary


def test_the_steps_are_those_of_the_first_policy_that_reaches_the_target() -> None:
    assert Climb(5, 0.8, [0.2, 0.5, 0.81]).steps == 10
    assert Climb(5, 0.8, [0.9]).steps == 0
    assert Climb(5, 0.8, [0.2, 0.5, 0.7]).steps is None


def test_a_seed_that_does_not_arrive_counts_as_the_slowest() -> None:
    climbs = [Climb(5, 0.8, each) for each in ([0.2, 0.8], [0.4, 0.5, 0.6], [0.3, 0.5, 0.9])]
    told = summary(climbs)
    assert told["rl_steps"] == [5, None, 10] and told["rl_steps_median"] == 10
    assert told["accuracy_before_rl"] == [0.2, 0.4, 0.3]
    assert told["curve"]["step"] == [0, 5, 10]
    assert told["curve"]["low"] == [0.2, 0.5, 0.6]  # a seed that has arrived waits
    assert summary(climbs[1:2])["rl_steps_median"] is None


def test_a_spread_is_median_least_and_most() -> None:
    assert spread([0.3, 0.1, 0.2]) == {"median": 0.2, "least": 0.1, "most": 0.3}
