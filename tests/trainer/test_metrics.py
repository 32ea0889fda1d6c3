from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.groups import Group
from peers.engines.loading import load
from peers.learning.learner import Learner
from peers.learning.metrics import Metrics, idle_shares, speed
from peers.learning.work import model_flops
from swarm.errors import UserError
from swarm.rollouts.rollout import Rollout
from tests.trainer.test_learner import SETTINGS, random_groups, settings, teach

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
    events = EventAccumulator(str(folder)).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_gets_what_is_a_finite_number(tmp_path: Path) -> None:
    environments = {"sort-digits": {"reward": 0.25, "keep_rate": 0.5}}
    Metrics(str(tmp_path)).record(7, {**FIGURES, "environments": environments})
    found = read_back(tmp_path)
    assert found["keep_rate/of/sort-digits"] == [(7, 0.5)]
    assert found["reward/reward"] == found["reward/of/sort-digits"] == [(7, 0.25)]
    assert found["policy/entropy"] == [(7, 1.5)]
    assert found["data/staleness"] == [(7, 2.0)]
    assert found["time/idle_rollouts_share"] == [(7, 0.25)]
    assert found["time/idle_share"] == [(7, 0.5)]
    assert not any("gradient_norm" in name or "outcomes" in name for name in found)


def test_a_resumed_run_writes_over_what_it_repeats(tmp_path: Path) -> None:
    first = Metrics(str(tmp_path))
    for step in range(3):
        first.record(step, {"reward": 0.1 * step})
    again = Metrics(str(tmp_path))
    again.record(2, {"reward": 0.9})
    found = read_back(tmp_path)["reward/reward"]
    assert [(step, round(value, 3)) for step, value in found] == [(0, 0.0), (1, 0.1), (2, 0.9)]


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


@pytest.mark.slow
def test_weights_and_biases_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart continues the same run, and its repeated steps replace the first ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    first = Metrics(wandb="project", run="owner/demo")
    for step in range(3):
        first.record(step, {"reward": 0.1 * step})
    first.record(1, {"reward": 0.9})
    assert {"step": 1, "reward/reward": 0.9}.items() <= dict(first._wandb.summary).items()
    first._wandb.finish()
    resumed = Metrics(wandb="project", run="owner/demo")
    resumed.record(2, FIGURES)
    assert first._wandb.id == resumed._wandb.id == "demo"
    resumed._wandb.finish()
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


def made_up_model(**config: Any) -> Any:
    """A model of 100 parameters in its layers, and an untied head and embedding of 40 each."""
    head, embedding = (
        SimpleNamespace(weight=torch.zeros(40, requires_grad=True)),
        SimpleNamespace(weight=torch.zeros(40, requires_grad=True)),
    )
    text = SimpleNamespace(
        num_hidden_layers=2, hidden_size=8, num_attention_heads=2, head_dim=4, **config
    )
    body = SimpleNamespace(
        named_parameters=lambda: [
            ("embed_tokens.weight", embedding.weight),
            ("layers.0.mlp.experts.weight", torch.zeros(80, requires_grad=True)),
            ("layers.0.self_attn.q_proj.weight", torch.zeros(20, requires_grad=True)),
        ]
    )
    return SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: text),
        get_decoder=lambda: body,
        get_output_embeddings=lambda: head,
        get_input_embeddings=lambda: embedding,
    )


def test_model_flops_count_what_is_computed() -> None:
    """Layers for each input, the head for each sampled token, no embedding, attention halved."""
    attention = 6 * 2 * 8 * 7**2
    assert model_flops(made_up_model(), [(7, 3)]) == 6 * 100 * 7 + 6 * 40 * 3 + attention
    routed = made_up_model(num_experts=8, num_experts_per_tok=2)
    assert model_flops(routed, [(7, 3)]) == 6 * 40 * 7 + 6 * 40 * 3 + attention


def test_speed_counts_what_was_trained_on(base: Path) -> None:
    """One of four groups is kept: the others are filtered out, or all of one reward."""
    single_turn = Rollout.single_turn
    kept = Group([single_turn([5, 6], [7, 8, 9]), single_turn([5, 6], [10])], [0.0, 1.0], 0)
    long = [single_turn([5] * 9, [6] * 7), single_turn([5] * 9, [7])]
    others = [
        Group(long, [0.0, 1.0], 0, kept=False),
        Group(long, [1.0, 1.0], 0),
        Group(long, [0.0, 0.0], 0),
    ]
    alone, among = (
        speed(teach(Learner(base, SETTINGS), groups, 0), seconds=2.0, peak=1e6)
        for groups in ([kept], [kept, *others])
    )
    assert alone == among
    assert alone["tokens_per_second"] == 4.0
    model = load(base)
    assert alone["model_flops_share"] == model_flops(model, [(4, 3), (2, 1)]) / 2 / 1e6


def test_copies_of_a_sequence_are_computed_once(base: Path) -> None:
    """They are tokens trained on, but not operations."""
    one, other = Rollout.single_turn([5, 6], [7, 8]), Rollout.single_turn([5, 6], [9, 8])
    found = [
        teach(Learner(base, SETTINGS), [Group(rollouts, rewards, 0)], 0)
        for rollouts, rewards in (([one, other], [0.0, 1.0]), ([one, other, one], [0.0, 1.0, 0.0]))
    ]
    assert [each["trained_tokens"] for each in found] == [8.0, 12.0]
    assert found[0]["model_flops"] == found[1]["model_flops"] > 0


def test_a_skipped_optimiser_step_is_no_work(base: Path) -> None:
    group = dataclasses.replace(random_groups(1, policy=0)[0], rewards=[3e38, -3e38, 0.0, 1.0])
    figures = teach(Learner(base, settings(normalise_by_std=False)), [group], 0)
    assert figures["skipped"] == 1
    assert speed(figures, seconds=2.0, peak=1e6) == {
        "train_seconds": 2.0,
        "tokens_per_second": 0.0,
        "model_flops_share": 0.0,
    }
