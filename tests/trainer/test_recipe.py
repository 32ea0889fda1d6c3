from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.recipe import main, run
from peers.demo.recipes import RECIPES
from peers.demo.warmup import prepare_base
from peers.engines.adapter_config import is_adapter
from peers.engines.demo import EOS_ID, UNKNOWN, VOCABULARY, make_policy, save_tokenizer
from peers.environments import Renderer, task_of
from peers.environments.collection import Environments
from peers.environments.episodes import demonstrate
from swarm.wire.identity import Identity

TRUSTED = Identity(bytes([1]) * 32).peer_id
UNKNOWN_ID = VOCABULARY.index(UNKNOWN)


@pytest.mark.parametrize("name", sorted(RECIPES))
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


def test_a_run_with_an_adapter_is_tried_without_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_policy(tmp_path / "model", 0)
    file = tmp_path / "run.toml"
    file.write_text(
        f"""
        name = "tried"
        version = 1
        model = "{tmp_path}/model"
        trainers = ["{TRUSTED}"]
        validators = ["{TRUSTED}"]
        environments = [{{name = "sort-digits", version = "1"}}]
        adapter = {{rank = 2}}
        optimiser = {{warmup_steps = 1}}
        sampling = {{max_new_tokens = 8, stop_ids = [{EOS_ID}], group_size = 4}}
        schedule = {{steps = 3, groups_per_step = 2}}
        """
    )
    main(["--run", str(file), "--seeds=1", "--prompts=4", f"--keep={tmp_path / 'kept'}"])
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert len(found["reward_by_tenth"]) == 3
    assert found["engine_log_probability_difference"] < 1e-4
    assert is_adapter(tmp_path / "kept" / "0" / "3")


@pytest.mark.slow
def test_the_demo_recipe_learns_without_a_network() -> None:
    result = run(0, steps=250)
    assert 0.15 <= result["sampled_accuracy_before"] <= 0.3
    assert result["sampled_accuracy_after"] >= 0.80
    assert result["engine_log_probability_difference"] < 1e-4


@pytest.mark.slow
def test_the_same_seed_prepares_the_same_base(tmp_path: Path) -> None:
    for name, seed in (("a", 2), ("b", 2), ("c", 3)):
        prepare_base(tmp_path / name, seed)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b", "c")]
    assert weights[0] == weights[1] != weights[2]
