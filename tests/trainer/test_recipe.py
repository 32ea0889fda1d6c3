from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recipe import run
from peers.demo.recipes import RECIPES
from peers.demo.warmup import prepare_base
from peers.engines.demo import EOS_ID, UNKNOWN, VOCABULARY, save_tokenizer
from peers.environments import Renderer, task_of
from peers.environments.collection import Environments
from peers.environments.episodes import demonstrate

UNKNOWN_ID = VOCABULARY.index(UNKNOWN)


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"reasoning-gym"}))
def test_a_demo_can_write_and_fit_its_answers(name: str, tmp_path: Path) -> None:
    """An answer with a character that the demo's tokenizer lacks could never be right."""
    recipe = RECIPES[name]
    save_tokenizer(tmp_path)
    renderer, environments = Renderer(tmp_path), Environments(recipe.environments)
    for environment in map(environments.of, recipe.environments):
        for number in range(64):
            task = task_of(environment, number.to_bytes(32, "big"))
            segments = demonstrate(environment, task, renderer, EOS_ID)
            tokens = [token for segment in segments for token in segment.tokens]
            model = [len(segment.tokens) for segment in segments if segment.kind == "model"]
            assert UNKNOWN_ID not in tokens
            assert len(tokens) <= recipe.positions
            assert sum(model) <= recipe.sampling.max_new_tokens


@pytest.mark.slow
def test_the_demo_recipe_learns_without_a_network() -> None:
    result = run(0, steps=250)
    assert 0.15 <= result["sampled_accuracy_before"] <= 0.3
    assert result["sampled_accuracy_after"] >= 0.80
    assert result["engine_log_probability_difference"] < 1e-4


@pytest.mark.slow
def test_the_same_seed_prepares_the_same_base(tmp_path: Path) -> None:
    measured = [
        prepare_base(tmp_path / name, seed) for name, seed in (("a", 2), ("b", 2), ("c", 3))
    ]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b", "c")]
    assert weights[0] == weights[1] != weights[2]
    assert measured[0] == measured[1]
    assert all(0.15 <= each.sampled <= 0.3 for each in measured)
