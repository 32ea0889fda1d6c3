"""Figures of each environment; groups older than their environment allows are left out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from peers.trainer.pool import Accepted, label_old
from peers.trainer.training import environment_figures
from swarm.rollouts.rollouts import parts_of
from swarm.wire.manifest import EnvironmentReference
from tests.orders import verdict

CALCULATOR = EnvironmentReference(name="calculator", version="1")
SORTING = EnvironmentReference(name="sort-digits", version="1")


def accepted(step: int, *rewards: list[float], environment: int = 0, **fields: Any) -> Accepted:
    of_groups = [environment] * len(rewards)
    judged = verdict(
        step=step, policy=step, rewards=list(rewards), environments=of_groups, **fields
    )
    return Accepted(bytes(32), judged, "", ["kept"] * len(rewards))


def test_each_environment_may_bound_the_age_of_its_groups() -> None:
    environments = [msgspec.structs.replace(SORTING, max_staleness=1), CALCULATOR]
    young, other = (accepted(3, [1.0, 0.0], environment=index).verdict for index in (0, 1))
    for step, label in ((3, "kept"), (4, "kept"), (5, "too_old")):
        assert label_old(["kept"], young, environments, step) == [label]
        assert label_old(["too_hard"], young, environments, step) == ["too_hard"]
        assert label_old(["kept"], other, environments, step) == ["kept"]


def test_figures_of_each_environment() -> None:
    batch = [
        accepted(0, [1.0, 0.0], [0.0, 0.0]),
        accepted(
            0, [0.9, 0.7], environment=1, task_means=[0.5], task_spreads=[1.0]
        ),  # with a length penalty: one of two is right
    ]
    batch[0].labels[1] = "no_spread"
    other = msgspec.structs.replace(SORTING, name="without-groups")
    computed = [{"completion_length": 7.5, "entropy": 0.5}, {}, {"entropy": 9.0}]
    found = environment_figures(batch, computed, [CALCULATOR, SORTING, other])
    assert found["calculator"] == {
        "reward": 0.25, "pass_at_1": 0.25, "pass_at_g": 0.5, "keep_rate": 0.5, "groups": 2.0,
        "completion_length": 7.5, "entropy": 0.5, "quarantine_rate": 0.0,
    }  # fmt: skip
    assert list(found) == ["calculator", "sort-digits", "without-groups"]
    assert found["without-groups"] == {}
    assert found["sort-digits"]["pass_at_1"] == 0.5 and found["sort-digits"]["pass_at_g"] == 1.0
    assert found["sort-digits"]["reward"] == pytest.approx(0.8)


def test_a_group_without_a_grade_has_figures_but_no_reward() -> None:
    parts = parts_of([{"form": 1.0}, {"form": 0.5}, {}, {}])
    batch = [accepted(0, [1.0, 0.0], [0.0, 0.0], quarantined=[1], parts=parts)]
    batch[0].labels[1] = "quarantined"
    assert environment_figures(batch, [], [CALCULATOR])["calculator"] == {
        "groups": 2.0, "keep_rate": 0.5, "quarantine_rate": 0.5,
        "reward": 0.5, "pass_at_1": 0.5, "pass_at_g": 1.0, "part_form": 0.75,
    }  # fmt: skip
    batch[0].labels[0] = "quarantined"
    assert "reward" not in environment_figures(batch, [], [CALCULATOR])["calculator"]
