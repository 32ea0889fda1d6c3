"""The native engine against transformers, against itself unbatched, and against its own prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from peers.engines import demo, model, noise
from peers.engines import rows as rows_module
from peers.engines.native import NativeEngine
from peers.engines.registry import make_engine
from swarm.errors import UserError
from tests.engines.harness import complete, prefill_completions

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PROMPTS = [[1, 5, 9], [3], [7, 7, 2, 40, 41, 42, 8], [1, 5, 9], [11, 12]]
FAMILIES: dict[str, Any] = {
    "qwen2": transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False),
    "llama": transformers.LlamaConfig(**SMALL, attention_bias=True),
    "llama3-rope": transformers.LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
}


def save_random(config: Any, folder: Path, seed: int) -> Any:
    """A model whose every weight is random (biases and norms too), so that none goes untested."""
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    reference.save_pretrained(folder)
    return reference.eval()


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    reference = save_random(FAMILIES[request.param], folder, seed=1)
    return reference, NativeEngine(folder), folder


def reference_logits(reference: Any, prompt: list[int], completion: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([[*prompt, *completion]])).logits[0]
    return logits[len(prompt) - 1 : -1]


def first_logits(engine: Any, prompts: list[list[int]]) -> Tensor:
    """Of a completion of the first prompt."""
    logits: Tensor = engine.logits(
        prefill_completions(engine, prompts, [[1, 2]] * len(prompts)).states[0]
    )
    return logits


def test_prefill_equals_transformers(pair: Any) -> None:
    reference, engine, _ = pair
    completions = [[4, 4, 4], [2, 9, 9, 1, 30, 31], [8], [20, 21], [6]]
    result = prefill_completions(engine, PROMPTS, completions)
    for prompt, completion, states in zip(PROMPTS, completions, result.states, strict=True):
        expected = reference_logits(reference, prompt, completion)
        assert torch.allclose(engine.logits(states), expected, atol=2e-4)


def test_greedy_generation_equals_transformers(pair: Any) -> None:
    reference, engine, _ = pair
    result = complete(engine, PROMPTS, range(5), None, 1.0, [0], 9)
    for prompt, tokens in zip(PROMPTS, result.tokens, strict=True):
        logits = reference_logits(reference, prompt, tokens)
        assert tokens == logits.argmax(-1).tolist()
        assert len(tokens) == 9 or tokens[-1] == 0


def test_decoding_equals_prefill(pair: Any) -> None:
    _, engine, _ = pair
    made = complete(engine, PROMPTS, [4, 0, 9, 5, 2], (1, 2), 0.8, [0, 3], 12)
    again = prefill_completions(engine, PROMPTS, made.tokens)
    for row, tokens in enumerate(made.tokens):
        log_mu = torch.log_softmax(engine.logits(again.states[row]) / 0.8, -1)[
            range(len(tokens)), tokens
        ]
        assert torch.allclose(log_mu, made.log_probabilities[row], atol=1e-4)
        assert made.hidden[row].shape == again.hidden[row].shape
        assert made.hidden[row].dtype == again.hidden[row].dtype == torch.bfloat16
        assert torch.allclose(
            made.hidden[row].float(), again.hidden[row].float(), rtol=0.01, atol=1e-3
        )
        assert len(made.prompt_hidden[row]) == len(PROMPTS[row]) - 1
        assert torch.allclose(
            made.prompt_hidden[row].float(), again.prompt_hidden[row].float(), rtol=0.01, atol=1e-3
        )


def test_each_row_equals_its_unbatched_run(pair: Any) -> None:
    _, engine, _ = pair
    numbers = [4, 0, 9, 5, 2]
    # Two stop ids among 50 end rows at different steps, so that the batch shrinks on the way.
    stops = list(range(8))
    together = complete(engine, PROMPTS, numbers, (7, 8), 1.0, stops, 20)
    assert len({len(tokens) for tokens in together.tokens}) > 1
    for index, (prompt, row) in enumerate(zip(PROMPTS, numbers, strict=True)):
        alone = complete(engine, [prompt], [row], (7, 8), 1.0, stops, 20)
        assert alone.tokens[0] == together.tokens[index]
        assert torch.allclose(
            alone.log_probabilities[0], together.log_probabilities[index], atol=1e-4
        )


def test_rows_end_at_the_first_stop_id_inclusive(pair: Any) -> None:
    _, engine, _ = pair
    free = complete(engine, PROMPTS, range(5), (3, 4), 1.0, [], 12).tokens
    stops = [free[0][4], free[2][1]]
    for whole, cut in zip(
        free, complete(engine, PROMPTS, range(5), (3, 4), 1.0, stops, 12).tokens, strict=True
    ):
        end = next((i + 1 for i, token in enumerate(whole) if token in stops), 12)
        assert cut == whole[:end]


def test_equal_prompts_get_different_noise_by_row(pair: Any) -> None:
    _, engine, _ = pair
    made = complete(engine, [[1, 2]] * 6, range(6), (1, 1), 1.5, [], 8).tokens
    assert len({tuple(tokens) for tokens in made}) > 1
    assert complete(engine, [[1, 2]], [3], (1, 1), 1.5, [], 8).tokens[0] == made[3]


def test_hot_swap_equals_a_fresh_engine_and_refuses_another_model(tmp_path: Path) -> None:
    for name, seed in (("old", 1), ("new", 2)):
        save_random(FAMILIES["qwen2"], tmp_path / name, seed)
    other = transformers.Qwen2Config(**{**SMALL, "intermediate_size": 64})
    save_random(other, tmp_path / "other", 3)
    engine = NativeEngine(tmp_path / "old")
    before = first_logits(engine, PROMPTS)
    with pytest.raises(UserError, match="intermediate_size differs"):
        engine.load_weights(tmp_path / "other", 1)
    assert torch.equal(first_logits(engine, PROMPTS), before)
    engine.load_weights(tmp_path / "new", 1)
    after = first_logits(engine, PROMPTS)
    fresh = first_logits(NativeEngine(tmp_path / "new"), PROMPTS)
    assert torch.equal(after, fresh) and not torch.allclose(after, before)


@pytest.mark.parametrize(
    ("prompts", "limit", "message"),
    [
        ([[]], 3, "no token"),
        ([[50]], 3, "outside the vocabulary"),
        ([[-1]], 3, "outside the vocabulary"),
        ([[1]], 0, "no position from 0 is below the limit 0"),
        ([[1]], 64, "65 positions"),
    ],
)
def test_bad_arguments_are_refused(
    pair: Any, prompts: list[list[int]], limit: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        complete(pair[1], prompts, [0], (1, 2), 1.0, [0], limit)


def test_cutting_work_into_pieces_changes_nothing(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine, _ = pair
    made = complete(engine, PROMPTS, range(5), (3, 4), 1.0, [0], 6)
    whole = prefill_completions(engine, PROMPTS, made.tokens)
    monkeypatch.setattr(noise, "ENTRIES_MAX", 1)
    monkeypatch.setattr(rows_module, "PREFILL_TOKENS_MAX", 5)
    monkeypatch.setattr(engine._prefiller, "tokens_max", 5)
    again = NativeEngine(pair[2], slots=2)
    assert complete(again, PROMPTS, range(5), (3, 4), 1.0, [0], 6).tokens == made.tokens
    for one, other in zip(
        prefill_completions(engine, PROMPTS, made.tokens).states, whole.states, strict=True
    ):
        assert torch.allclose(one, other, atol=1e-4)


def test_a_further_turn_goes_on_counting_positions(pair: Any) -> None:
    """Generating from an episode so far equals generating it in one go, noise and all."""
    _, engine, _ = pair
    rows, key = [4, 0, 9, 5, 2], (3, 4)
    whole = complete(engine, PROMPTS, rows, key, 1.0, [0], 12)
    wanted = (1, 5, 3, 2, 7)
    cuts = [min(cut, len(made) - 1) for cut, made in zip(wanted, whole.tokens, strict=True)]
    parts = [tokens[:cut] for cut, tokens in zip(cuts, whole.tokens, strict=True)]
    episodes = [[*prompt, *part] for prompt, part in zip(PROMPTS, parts, strict=True)]
    further = complete(engine, episodes, rows, key, 1.0, [0], 12, starts=cuts)
    for row, cut in enumerate(cuts):
        assert further.tokens[row] == whole.tokens[row][cut:]
        torch.testing.assert_close(
            further.log_probabilities[row],
            whole.log_probabilities[row][cut:],
            atol=1e-4,
            rtol=0,
        )
    with pytest.raises(ValueError, match="no position from 12 is below the limit 12"):
        complete(engine, [[1]], [0], key, 1.0, [0], 12, starts=[12])


def test_prefill_gives_the_states_of_the_marked_tokens(pair: Any) -> None:
    _, engine, _ = pair
    sequence, sampled = [5, 1, 7, 7, 2, 30, 4, 9], [2, 3, 6, 7]
    found = engine.prefill([sequence], [sampled])
    every = engine.prefill([sequence], [range(1, len(sequence))])
    assert torch.equal(found.states[0], every.states[0][[index - 1 for index in sampled]])
    assert torch.equal(found.prompt_hidden[0], every.hidden[0][:1])
    for wrong in ([], [0, 7], [2, 6]):
        with pytest.raises(ValueError, match="must begin after the prompt"):
            engine.prefill([sequence], [wrong])


def test_an_empty_batch_is_empty(pair: Any) -> None:
    assert complete(pair[1], [], [], (1, 2), 1.0, [0], 3).tokens == []
    assert prefill_completions(pair[1], [], []).states == []


def test_the_demo_policy_loads_with_transformers(tmp_path: Path) -> None:
    made = demo.make_policy(tmp_path, seed=3)
    assert model.count_parameters(made) == 228_192
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    assert tokenizer("10>")["input_ids"] == [demo.BOS_ID, 5, 4, 14]
    assert tokenizer.decode([5, 4, 14]) == "10>"
    assert torch.equal(loaded.model.norm.weight, made.model.norm.weight)
    model.save(model.load(tmp_path), tmp_path / "copy", tokenizer_from=tmp_path)
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {
        path.name for path in tmp_path.iterdir() if path.is_file()
    }
    assert torch.equal(
        first_logits(make_engine("native", tmp_path / "copy"), [[1]]),
        first_logits(make_engine("native", tmp_path), [[1]]),
    )


def test_pickled_missing_and_broken_weights_are_refused(tmp_path: Path) -> None:
    FAMILIES["qwen2"].save_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds no safetensors weights"):
        model.load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(UserError, match=r"pickled weights .* refused"):
        model.load(tmp_path)
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
