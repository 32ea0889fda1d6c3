from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peers.trainer.learning.batch import Group
from peers.trainer.metrics import Metrics, idle_shares, model_flops, speed
from swarm.errors import UserError
from swarm.rollouts.rollout import Rollout

FIGURES: dict[str, Any] = {
    "reward": 0.25,
    "gradient_norm": float("nan"),
    "entropy": 1.5,
    "staleness": 2,
    "step": 7,
    "idle_rollouts_seconds": 2.0,
    "idle_checks_seconds": 1.0,
    "idle_weights_seconds": 1.0,
    "step_seconds": 8.0,
    "outcomes": [["consumed"]],
}


def read_back(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_gets_what_is_a_finite_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    Metrics(str(tmp_path)).record(7, {**FIGURES, "environment_rewards": {"sort-digits": 0.25}})
    found = read_back(tmp_path)
    assert found["reward/reward"] == found["reward/of/sort-digits"] == [(7, 0.25)]
    assert found["policy/entropy"] == [(7, 1.5)]
    assert found["data/staleness"] == [(7, 2.0)]
    assert found["time/idle_rollouts_share"] == [(7, 0.25)]
    assert found["time/idle_share"] == [(7, 0.5)]
    assert not any("gradient_norm" in name or "outcomes" in name for name in found)


def test_a_resumed_run_writes_over_what_it_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first = Metrics(str(tmp_path))
    for step in range(3):
        first.record(step, {"reward": 0.1 * step})
    again = Metrics(str(tmp_path))
    again.record(2, {"reward": 0.9})
    found = read_back(tmp_path)["reward/reward"]
    assert [(step, round(value, 3)) for step, value in found] == [(0, 0.0), (1, 0.1), (2, 0.9)]


def test_nothing_asked_for_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Metrics().record(0, FIGURES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["tensorboard", "wandb"])
def test_a_missing_library_is_one_sentence(
    option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    where: dict[str, Any] = {option: str(tmp_path)}
    with pytest.raises(
        UserError, match=rf"trainer\.{option} is set, but {option} is not installed"
    ):
        Metrics(**where)


def test_weights_and_biases_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="an option of the trainer, installed by who wants it")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    Metrics(wandb="project", run="owner/demo").record(0, FIGURES)
    assert list((tmp_path / "wandb").glob("offline-run-*-demo"))


def test_what_weights_and_biases_lacks_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Error(Exception):
        """As the library's."""

    def init(**_: Any) -> None:
        raise Error("No API key configured.")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=Error))
    with pytest.raises(
        UserError, match=r"trainer\.wandb = 'project': No API key .* WANDB_MODE=offline"
    ):
        Metrics(wandb="project", run="owner/demo")


def test_shares_of_time() -> None:
    assert idle_shares({}) == {}
    assert idle_shares({"step_seconds": 4.0, "idle_checks_seconds": 1.0}) == {
        "idle_rollouts_share": 0.0,
        "idle_checks_share": 0.25,
        "idle_weights_share": 0.0,
        "idle_share": 0.25,
    }


def test_model_flops_of_a_dense_model() -> None:
    """7 B parameters, 32 layers of 4096, one sequence of 4096 tokens: attention adds 8 %."""
    needed = model_flops(7_000_000_000, 32, 4096, [4096])
    assert needed == 6 * 7e9 * 4096 + 6 * 32 * 4096 * 4096**2
    assert needed / (6 * 7e9 * 4096) == pytest.approx(1.077, abs=1e-3)


def test_speed_counts_what_was_trained_on() -> None:
    """One of four groups is kept: the others are filtered out, or all of one reward."""
    model = SimpleNamespace(
        config=SimpleNamespace(num_hidden_layers=2, hidden_size=8),
        parameters=lambda: [torch.zeros(100)],
    )
    single_turn = Rollout.single_turn
    kept = Group([single_turn([1, 2], [3, 4, 5]), single_turn([1, 2], [6])], [0.0, 1.0], 0)
    long = [single_turn([1] * 9, [2] * 9), single_turn([1] * 9, [3])]
    others = [
        Group(long, [0.0, 1.0], 0, kept=False),
        Group(long, [1.0, 1.0], 0),
        Group(long, [0.0, 0.0], 0),
    ]
    alone = speed(model, [kept], seconds=2.0, peak=1e6)
    assert alone["tokens_per_second"] == 4.0
    assert alone["model_flops_share"] > 0
    assert speed(model, [kept, *others], seconds=2.0, peak=1e6) == alone
