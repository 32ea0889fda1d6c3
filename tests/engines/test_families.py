"""Every family is computed as transformers does: in one pass, and token by token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from peers.engines import model
from peers.engines.architecture import FAMILIES, describe
from peers.engines.loading import load, published, published_owners
from peers.engines.native import NativeEngine
from swarm.errors import UserError
from tests.engines.families import SUPPORTED, WINDOW, log_probabilities, save_random
from tests.engines.harness import complete, prefill_completions

PROMPTS = [[1, 5, 9], [3], [7, 7, 2, 40, 41, 42, 8, 11, 12, 49], [1, 5, 9], [11, 12]]
NEW_TOKENS = 4 * WINDOW
EXACT = 1e-5
"""Largest difference of a log-probability, in nats."""


@pytest.fixture(scope="module", params=list(SUPPORTED))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    reference = save_random(SUPPORTED[request.param], folder, seed=1, scale=0.2)
    return reference, NativeEngine(folder)


def test_a_pass_equals_transformers(pair: Any) -> None:
    reference, engine = pair
    completions = [[4] * 9, list(range(20)), [8], [20, 21], list(range(30, 50))]
    result = prefill_completions(engine, PROMPTS, completions)
    for prompt, completion, states in zip(PROMPTS, completions, result.states, strict=True):
        expected = log_probabilities(reference, [*prompt, *completion])[len(prompt) - 1 :]
        found = torch.log_softmax(engine.logits(states), -1)
        torch.testing.assert_close(found, expected, atol=EXACT, rtol=0)


def test_token_by_token_equals_transformers(pair: Any) -> None:
    reference, engine = pair
    made = complete(engine, PROMPTS, range(5), (1, 2), 1.0, [0], NEW_TOKENS)
    assert max(map(len, made.tokens)) > 2 * WINDOW
    for prompt, tokens, found in zip(PROMPTS, made.tokens, made.log_probabilities, strict=True):
        expected = log_probabilities(reference, [*prompt, *tokens])[len(prompt) - 1 :]
        chosen = expected.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(found, chosen, atol=EXACT, rtol=0)


def test_every_family_is_tested() -> None:
    assert {config.model_type for config in SUPPORTED.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_defaults_are_those_of_transformers(name: str) -> None:
    head: dict[str, Any] = {"head_dim": 64} if "qwen3" in name else {}
    theirs = transformers.AutoConfig.for_model(name, **head)
    needed = {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_experts",
        "num_attention_heads", "max_position_embeddings", "rms_norm_eps", "moe_intermediate_size",
        "num_experts_per_tok", "model_type",
    }  # fmt: skip
    if name != "llama":
        needed |= {"num_key_value_heads", "sliding_window"}
    least = head | {field: getattr(theirs, field) for field in needed if hasattr(theirs, field)}
    assert describe(least) == describe(theirs.to_dict())


@pytest.mark.parametrize("name", [name for name in SUPPORTED if "moe" in name])
def test_experts_are_published_one_by_one(name: str, tmp_path: Path) -> None:
    """As by transformers, whichever rank writes them."""
    save_random(SUPPORTED[name], tmp_path / "theirs", seed=3)
    loaded = load(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    weights = dict(loaded.named_parameters())
    owners = {name: index % 2 for index, name in enumerate(weights)}
    writers = published_owners(loaded, owners)
    for rank in (1, 0):
        mine = {name: value.detach() for name, value in weights.items() if owners[name] == rank}
        share = published(loaded, mine)
        model.save_share(
            share, tmp_path / "ours", loaded.config, tmp_path / "theirs", rank, writers
        )
    ours, theirs = (stored(tmp_path / side) for side in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == theirs.keys()
    again = load(tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), weights.values(), strict=True))
    assert model.read_weights(tmp_path / "ours").keys() == weights.keys()


def stored(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder by their published names."""
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = stored(folder)
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("qwen2", lambda w: w.pop("model.norm.weight"), "lack model.norm.weight"),
        (
            "qwen2",
            lambda w: w.update({"model.norm.weight": torch.ones(7)}),
            r"model.norm.weight in .* has shape \[7\], not \[32\]",
        ),
        (
            "llama",
            lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
            "hold model.layers.0.self_attn.q_proj.bias, which a llama model with this config.json",
        ),
        (
            "qwen3-moe",
            lambda w: w.pop("model.layers.1.mlp.experts.2.up_proj.weight"),
            "lack model.layers.1.mlp.experts.gate_up_proj",
        ),
    ],
)
def test_weights_that_do_not_fit_are_a_sentence(
    name: str, change: Any, sentence: str, tmp_path: Path
) -> None:
    save_random(SUPPORTED[name], tmp_path, seed=3)
    change_weights(tmp_path, change)
    with pytest.raises(UserError, match=sentence):
        NativeEngine(tmp_path)


def test_weights_that_nothing_reads_are_no_fault(tmp_path: Path) -> None:
    save_random(SUPPORTED["qwen2-tied"], tmp_path, seed=3)
    unread = {
        "lm_head.weight": torch.ones(50, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    change_weights(tmp_path, lambda weights: weights.update(unread))
    NativeEngine(tmp_path)
