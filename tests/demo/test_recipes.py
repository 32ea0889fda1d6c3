"""The recipe of a demo: for an environment of one's own, and for a model that is given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from peers.demo.recipes import LORA, RECIPES, TEMPERATURE, TOKENS_MAX, recipe_of
from peers.demo.setup import DemoOptions, check_memory, check_options, configure, make_peers
from peers.engines.demo import EOS_ID, make_policy, save_tokenizer
from swarm.errors import UserError
from tests.demo.chat_model import make_chat_model


def rows(folder: Path, *tasks: Mapping[str, str]) -> dict[str, str]:
    """The options of the environment `dataset` with these rows, so often that some are held out."""
    path = folder / "rows.jsonl"
    lines = [
        json.dumps({**task, "prompt": f"{number} {task['prompt']}"})
        for number in range(100)
        for task in tasks
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return {"path": str(path)}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    save_tokenizer(folder)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_chat_model(tmp_path / "model")


def test_a_known_demo_is_as_it_is(tokenizer: Path) -> None:
    assert recipe_of("code", tokenizer=tokenizer) is RECIPES["code"]


def test_an_environment_of_ones_own_gets_lengths_that_fit_and_a_warm_up(
    tmp_path: Path, tokenizer: Path
) -> None:
    options = rows(tmp_path, {"prompt": "x" * 70, "answer": "seven"})
    recipe = recipe_of("dataset", options, tokenizer=tokenizer)
    assert recipe.sampling.max_new_tokens == len("seven") + 2  # its end, and one to spare
    assert recipe.positions >= 70 + 7
    assert recipe.warmup is not None and recipe.adapter.rank == 0
    assert recipe.environments[0].version == "1"


def test_a_model_is_asked_in_a_chat_and_trains_adapters(model: Path) -> None:
    recipe = recipe_of("sort-digits", model=model)
    (environment,) = recipe.environments
    assert environment.options == {"chat": True, "system_prompt": "Sort the digits."}
    assert recipe.sampling.temperature == TEMPERATURE
    assert recipe.sampling.max_new_tokens == 8 and recipe.sampling.stop_ids == [EOS_ID]
    assert recipe.adapter == LORA and recipe.thresholds.observes
    own = recipe_of("sort-digits", {"system_prompt": "Order them."}, model=model)
    assert own.environments[0].options["system_prompt"] == "Order them."


def test_tasks_without_answers_have_no_warm_up(tmp_path: Path, model: Path) -> None:
    options = rows(tmp_path, {"prompt": "guess", "answer": ""})
    recipe = recipe_of("dataset", options, model=model)
    assert recipe.warmup is None and recipe.sampling.max_new_tokens == TOKENS_MAX


def test_a_base_without_a_chat_template_is_told_what_to_do(tmp_path: Path) -> None:
    make_policy(tmp_path / "plain", seed=0)
    with pytest.raises(UserError, match=r"has no chat template.*--option chat=false"):
        recipe_of("sort-digits", model=tmp_path / "plain")
    recipe = recipe_of("sort-digits", {"chat": False}, model=tmp_path / "plain")
    assert recipe.environments[0].options == {"chat": False}


def test_wrong_environments_are_sentences(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(UserError, match="environment 'nope' is not installed here; known"):
        recipe_of("nope", tokenizer=tokenizer)
    strange = rows(tmp_path, {"prompt": "é", "answer": "e"})
    with pytest.raises(UserError, match="characters that the policy made here does not know"):
        recipe_of("dataset", strange, tokenizer=tokenizer)
    silent = rows(tmp_path, {"prompt": "guess", "answer": ""})
    with pytest.raises(UserError, match=r"tells no answers.*--model"):
        recipe_of("dataset", silent, tokenizer=tokenizer)


def test_a_model_that_is_too_large_is_refused_before_anything_starts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = DemoOptions(model="some/model", peers=2)
    monkeypatch.setattr("peers.demo.setup.free_memory_bytes", lambda: 10**9)
    check_memory(model, options)
    monkeypatch.setattr("peers.demo.setup.free_memory_bytes", lambda: 10**8)
    with pytest.raises(UserError, match=r"some/model and 2 inference .* 0\.1 GB are free.*--peers"):
        check_memory(model, options)


def test_a_cheat_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--cheat is 'int4'; give one of: wrong-weights, int8"):
        check_options(DemoOptions(cheat="int4", out=tmp_path))


def test_settings_of_the_line_reach_the_peers_that_have_them(tmp_path: Path) -> None:
    of_all = ["uplink_mbps=20", "alarms.starved_seconds=60.0"]
    options = DemoOptions(settings=["trainer.device=cpu", *of_all])
    check_options(options)
    peers = make_peers(tmp_path, inference_peers=1)
    configure(peers, "/ip4/127.0.0.1/tcp/1", tmp_path, options)
    for peer in peers:
        given = [] if peer.role == "bootstrap" else of_all
        assert all(each in peer.arguments for each in given)
        assert peer.arguments.count("--set") == len(given) + (peer.role == "trainer")
        assert ("trainer.device=cpu" in peer.arguments) == (peer.role == "trainer")
    with pytest.raises(UserError, match="unknown key 'speed'"):
        check_options(DemoOptions(settings=["inference.speed=1"]))
