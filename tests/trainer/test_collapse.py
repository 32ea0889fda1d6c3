from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.trainer.collapse import (
    HISTORY_STEPS_MIN,
    RECENT_STEPS,
    UNREWARDED,
    UNREWARDED_ADVICE,
    UNREWARDED_STEPS,
    Alarm,
    AlarmLimits,
    Alarms,
)
from swarm.sentences import sentence


def steps(count: int, **figures: float) -> list[dict[str, float]]:
    healthy = {
        "gradient_norm": 0.1,
        "clipped_low": 0.01,
        "clipped_high": 0.01,
        "entropy": 1.0,
        "reward": 0.5,
        "skipped": 0.0,
    }
    return [{**healthy, **figures}] * count


def rung(history: Iterable[dict[str, float]]) -> list[Alarm]:
    alarms = Alarms()
    return [alarm for metrics in history for alarm in alarms.look(metrics)]


LONG = HISTORY_STEPS_MIN + RECENT_STEPS


@pytest.mark.parametrize(
    ("figures", "name", "words"),
    [
        ({"gradient_norm": 1.0}, "gradient_norm", "the gradient norm climbs: 0.46, above 0.4"),
        ({"clipped_low": 0.2}, "clipped_share", "more and more tokens are clipped"),
        ({"entropy": 2.0}, "entropy", "the entropy rises again"),
        ({"reward": 0.0}, "reward", "the reward has collapsed: 0.2, below 0.25"),
        ({"skipped": 1.0}, "skipped_share", "optimiser steps are skipped"),
        ({"gradient_norm": float("inf")}, "gradient_norm", "the gradient norm climbs: inf"),
    ],
)
def test_each_sign_rings_once_within_a_few_steps(
    figures: dict[str, float], name: str, words: str
) -> None:
    found = rung(steps(LONG) + steps(RECENT_STEPS, **figures))
    assert [alarm.name for alarm in found] == [name]
    assert found[0].sentence.startswith(words)
    assert not (found[0].limit >= found[0].figure and name != "reward")


def test_a_sign_that_went_rings_again() -> None:
    bad = steps(RECENT_STEPS, reward=0.0)
    found = rung(steps(LONG) + bad + steps(2 * RECENT_STEPS) + bad)
    assert [alarm.name for alarm in found] == ["reward", "reward"]


def test_one_bad_step_rings_nothing() -> None:
    assert rung(steps(LONG) + steps(1, gradient_norm=1.0, reward=0.0) + steps(LONG)) == []


def test_the_first_steps_of_a_run_ring_nothing() -> None:
    """Rewards rise from nothing and norms are wild until there is something usual."""
    wild = [
        {"gradient_norm": 10.0 ** (index % 4), "reward": 0.01 * index, "entropy": 2 - 0.1 * index}
        for index in range(HISTORY_STEPS_MIN)
    ]
    assert rung(wild) == []


@given(st.lists(st.floats(0.5, 1.5), max_size=80))
def test_ordinary_noise_rings_nothing(noise: list[float]) -> None:
    history = [
        {"gradient_norm": 0.1 * n, "clipped_low": 0.01 * n, "entropy": 1 + 0.05 * n, "reward": n}
        for n in noise
    ]
    limits = AlarmLimits(reward=0.3)
    alarms = Alarms(limits)
    assert [alarm for metrics in history for alarm in alarms.look(metrics)] == []


def test_a_reward_of_0_from_the_first_step_on_is_said_once() -> None:
    alarms = Alarms()
    nothing = steps(UNREWARDED_STEPS + 5, reward=0.0)
    found = [(at, each) for at, figures in enumerate(nothing, 1) for each in alarms.look(figures)]
    ((at, alarm),) = found
    assert (at, alarm.name) == (UNREWARDED_STEPS, UNREWARDED)
    assert "swarm environment check" in alarm.sentence
    assert alarms.unrewarded_steps == UNREWARDED_STEPS + 5
    alarms.look(steps(1, reward=0.01)[0])
    assert alarms.unrewarded_steps == 0
    alarms.look(steps(1, reward=0.0)[0])
    assert alarms.unrewarded_steps == 0, "something was earned before"


def test_a_run_without_any_reward_does_not_end_without_a_word() -> None:
    fields = {"steps": 3, "folder": "/policy", "unrewarded_steps": 3, "advice": UNREWARDED_ADVICE}
    said = sentence("trainer.run_complete", fields) or ""
    assert "the reward was 0 in each of its last 3 steps" in said
    assert "swarm environment check NAME" in said
    assert "reward" not in (
        sentence("trainer.run_complete", fields | {"unrewarded_steps": 0}) or ""
    )


def test_a_noisy_reward_that_halves_by_chance_has_not_collapsed() -> None:
    noisy = [0.4, 0.0, 0.1, 0.4, 0.0, 0.3, 0.4, 0.4, 0.1, 0.0, 0.3, 0.0, 0.1, 0.0, 0.2]
    recent = [sum(noisy[end - 5 : end]) / 5 for end in range(5, len(noisy) + 1)]
    assert min(recent[5:]) < max(recent) / 2
    alarms = Alarms()
    assert not [each for reward in noisy for each in alarms.look({"reward": reward})]
