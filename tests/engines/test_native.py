"""What the native engine does beyond the conformance of all engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from peers.engines import demo, loading, model, sampling
from peers.engines import rows as rows_module
from peers.engines.native import NativeEngine
from peers.engines.registry import make_engine
from swarm.errors import UserError
from tests.engines.families import SIZES, SUPPORTED, save_random
from tests.engines.harness import complete, prefill_completions

PROMPTS = [[1, 5, 9], [3], [7, 7, 2, 40, 41, 42, 8], [1, 5, 9], [11, 12]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen2")
    save_random(SUPPORTED["qwen2-tied"], made, seed=1)
    return made


def first_logits(engine: Any, prompts: list[list[int]]) -> Tensor:
    """Of a completion of the first prompt."""
    logits: Tensor = engine.logits(
        prefill_completions(engine, prompts, [[1, 2]] * len(prompts)).states[0]
    )
    return logits


def test_hot_swap_equals_a_fresh_engine_and_refuses_another_model(
    folder: Path, tmp_path: Path
) -> None:
    save_random(SUPPORTED["qwen2-tied"], tmp_path / "new", 2)
    other = transformers.Qwen2Config(**{**SIZES, "intermediate_size": 64})
    save_random(other, tmp_path / "other", 3)
    engine = NativeEngine(folder)
    before = first_logits(engine, PROMPTS)
    with pytest.raises(UserError, match="intermediate_size differs"):
        engine.load_weights(tmp_path / "other", 1)
    assert torch.equal(first_logits(engine, PROMPTS), before)
    engine.load_weights(tmp_path / "new", 1)
    after = first_logits(engine, PROMPTS)
    fresh = first_logits(NativeEngine(tmp_path / "new"), PROMPTS)
    assert torch.equal(after, fresh) and not torch.allclose(after, before)


def test_a_policy_stored_in_another_format_is_computed_in_the_engine_s(
    folder: Path, tmp_path: Path
) -> None:
    """The caches, and the class that a submission names, are those of the first policy."""
    halves = {name: value.bfloat16() for name, value in model.read_weights(folder).items()}
    safetensors.torch.save_file(halves, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    for first, second in ((folder, tmp_path), (tmp_path, folder)):
        engine = NativeEngine(first)
        dtype = engine.capabilities.dtype
        engine.load_weights(second, 1)
        assert engine._decoder.dtype == getattr(torch, dtype)
        assert len(complete(engine, PROMPTS, range(5), (3, 4), 1.0, [], 6).tokens[0]) == 6
        assert first_logits(engine, PROMPTS).dtype == torch.float32


def test_cutting_work_into_pieces_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NativeEngine(folder)
    made = complete(engine, PROMPTS, range(5), (3, 4), 1.0, [0], 6)
    whole = prefill_completions(engine, PROMPTS, made.tokens)
    monkeypatch.setattr(sampling, "ENTRIES_MAX", 1)
    monkeypatch.setattr(rows_module, "PREFILL_TOKENS_MAX", 5)
    monkeypatch.setattr(engine._prefiller, "tokens_max", 5)
    again = NativeEngine(folder, slots=2)
    assert complete(again, PROMPTS, range(5), (3, 4), 1.0, [0], 6).tokens == made.tokens
    for one, other in zip(
        prefill_completions(engine, PROMPTS, made.tokens).states, whole.states, strict=True
    ):
        assert torch.allclose(one, other, atol=1e-4)


def test_prefill_gives_the_states_of_the_marked_tokens(folder: Path) -> None:
    engine = NativeEngine(folder)
    sequence, sampled = [5, 1, 7, 7, 2, 30, 4, 9], [2, 3, 6, 7]
    found = engine.prefill([sequence], [sampled])
    every = engine.prefill([sequence], [range(1, len(sequence))])
    assert torch.equal(found.states[0], every.states[0][[index - 1 for index in sampled]])
    assert torch.equal(found.prompt_hidden[0], every.hidden[0][:1])
    for wrong in ([], [0, 7], [2, 6]):
        with pytest.raises(ValueError, match="must begin after the prompt"):
            engine.prefill([sequence], [wrong])


def test_the_demo_policy_loads_with_transformers(tmp_path: Path) -> None:
    made = demo.make_policy(tmp_path, seed=3)
    assert model.count_parameters(made) == 228_192
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    assert tokenizer("10>")["input_ids"] == [demo.BOS_ID, 5, 4, 14]
    assert tokenizer.decode([5, 4, 14]) == "10>"
    assert torch.equal(loaded.model.norm.weight, made.model.norm.weight)
    model.save(loading.load(tmp_path), tmp_path / "copy", tokenizer_from=tmp_path)
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {
        path.name for path in tmp_path.iterdir() if path.is_file()
    }
    assert torch.equal(
        first_logits(make_engine("native", tmp_path / "copy"), [[1]]),
        first_logits(make_engine("native", tmp_path), [[1]]),
    )


def test_pickled_missing_and_broken_weights_are_refused(tmp_path: Path) -> None:
    SUPPORTED["qwen2"].save_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds no safetensors weights"):
        loading.load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(UserError, match=r"pickled weights .* refused"):
        loading.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="is no safetensors file"):
        model.read_weights(tmp_path)


def test_unknown_engines_and_models_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown; there are: native, vllm"):
        make_engine("warp", tmp_path)
    with pytest.raises(UserError, match="swarm engine install"):
        make_engine("vllm", tmp_path)
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        make_engine("native", tmp_path)
