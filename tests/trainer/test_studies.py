from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import filtering, length, prime
from benchmarks.clipping import collapsed
from benchmarks.study import Curve, Variant, band, learn
from peers.trainer.warmup import prepare_base
from tests.trainer.test_learner import random_groups


def test_a_policy_that_was_twice_as_good_has_collapsed() -> None:
    assert collapsed(Curve(reward=[0.1, *[0.8] * 20, *[0.1] * 10]))
    assert not collapsed(Curve(reward=[0.1] * 5 + [0.8] * 20))
    assert not collapsed(Curve(reward=[0.2, 0.1, 0.2]))


def test_a_band_is_mean_least_and_most_over_seeds() -> None:
    drawn = band([[0.0, 1.0, 2.0], [2.0, 3.0, 4.0]], points=2)
    assert drawn == {
        "step": [0.0, 2.0],
        "mean": [1.0, 3.0],
        "low": [0.0, 2.0],
        "high": [2.0, 4.0],
    }


def test_a_target_is_reached_by_the_mean_of_ten_steps() -> None:
    assert prime.reached([0.0] * 10 + [1.0] * 10, 0.6) == 16
    assert prime.reached([0.5] * 30, 0.6) is None


def test_groups_of_another_accuracy_teach_nothing() -> None:
    (group, *_) = random_groups(0, policy=0)
    right_of_four = (Variant(accuracy=(0.2, 0.8)), [1.0, 0.0, 0.0, 0.0]), (Variant(), [1.0] * 4)
    found = [each.teaches(replace(group, rewards=rewards)) for each, rewards in right_of_four]
    assert found == [True, False]
    assert not Variant(accuracy=(0.3, 0.8)).teaches(replace(group, rewards=[1.0, 0.0, 0.0, 0.0]))


@pytest.mark.slow
def test_process_rewards_are_compared_with_outcomes_and_finished_runs_kept(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    options = ("--seeds", "1", "--steps", "10", "--runs", str(tmp_path / "runs"))
    result = printed(prime, capsys, monkeypatch, *options)
    assert list(result["variants"]) == ["grpo", "rloo", "prime"]
    figures = result["variants"]["prime"]
    assert figures["process_accuracy_of_the_last_ten"]["median"] > 0
    assert len(figures["curve"]["mean"]) == 10
    assert printed(prime, capsys, monkeypatch, *options) == result


@pytest.mark.slow
def test_staler_rollouts_weigh_less_evenly(tmp_path: Path) -> None:
    prepare_base(tmp_path / "base", 0)
    shares = []
    for staleness in (0, 6):
        curve = learn(tmp_path / "base", 0, Variant(staleness=staleness, steps=14))
        shares.append(min(curve.effective_share))
    assert shares[0] == pytest.approx(1)
    assert shares[1] < 0.9


def printed(module: Any, capsys: Any, monkeypatch: Any, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    module.main()
    return json.loads(capsys.readouterr().out)


@pytest.mark.long
def test_a_policy_learns_its_thinking_budget(capsys: Any, monkeypatch: Any) -> None:
    result = printed(length, capsys, monkeypatch, "--seeds", "1", "--steps", "60")
    assert result["off_target_after"] < 0.6 * result["off_target_before"]
    assert result["task_reward_after"] > 0.8


@pytest.mark.slow
def test_every_filter_spends_the_same_budget(capsys: Any, monkeypatch: Any) -> None:
    result = printed(
        filtering, capsys, monkeypatch, "--seeds", "1", "--budget", "1600", "--tasks", "128"
    )
    made = [variant["completions_generated"] for variant in result["variants"].values()]
    assert len(made) == 4
    assert all(1500 <= count < 1600 + 16 * 256 for count in made)
