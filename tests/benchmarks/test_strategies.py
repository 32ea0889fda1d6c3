"""What `benchmarks.strategies` prints: no strategy pays, and few fakes are trained on."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.strategies import STRATEGIES, measure, table
from peers.demo.recipes import THRESHOLDS

SAFETY = THRESHOLDS.recompute_safety


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return measure(steps=250, seeds=4)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if not name.startswith("near")])
def test_no_strategy_pays(report: dict[str, Any], name: str) -> None:
    row = report["strategies"][name]
    for gain in (row["gain"], row["gain_fines"]):
        assert gain is None or gain <= 0
    chance = 0.05  # the bound holds on average
    assert max(row["fake_share"], row["fake_share_fines"]) <= 1 / (SAFETY + 1) + chance


def test_lies_that_might_pass_cost_a_multiple_of_what_they_earn(report: dict[str, Any]) -> None:
    row = report["strategies"]["at shares below 0.6"]
    assert row["gain_fines"] == pytest.approx(-1000 * (SAFETY - 1), rel=0.4)


def test_answers_near_the_policy_earn_nothing_if_the_window_suffices_to_evict(
    report: dict[str, Any],
) -> None:
    near = [report["strategies"][f"near the policy, {nats} nats"] for nats in ("0.1", "0.01")]
    assert all(row["gain"] <= 20 for row in near), "of the last identity, when the run ends"
    assert all(row["evictions"] > 1 for row in near)


def test_honest_work_is_recomputed_less_and_less(report: dict[str, Any]) -> None:
    assert report["strategies"]["honest"]["recomputed"] < 0.3


def test_the_table_has_a_row_for_each_strategy(report: dict[str, Any]) -> None:
    assert len(table(report).splitlines()) == len(STRATEGIES) + 2
