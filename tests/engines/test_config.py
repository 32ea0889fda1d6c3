"""A model is computed exactly as transformers does, by engine and scorer, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trio

from peers.engines.config import why_unsupported
from peers.engines.registry import make_engine
from peers.trainer.learning.batch import Group, make_batch
from peers.trainer.learning.packing import Scorer, lay_out, lay_out_flat
from peers.trainer.supervised import SftService
from swarm.errors import UserError
from swarm.jobs.offline import StartTuning, TuningSettings
from swarm.messages import Objective
from swarm.rollouts.rollout import Rollout
from tests.engines.harness import prefill_completions
from tests.engines.test_native import save_random

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama-bias-tied": transformers.LlamaConfig(
        **SIZES, attention_bias=True, tie_word_embeddings=True
    ),
    "llama-rope": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-linear": transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "llama-yarn": transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    ),
    "llama-dynamic": transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "llama-gelu": transformers.LlamaConfig(**SIZES, hidden_act="gelu"),
    "llama-mlp-bias": transformers.LlamaConfig(**SIZES, mlp_bias=True),
    "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-window": transformers.Qwen2Config(**SIZES, **WINDOW),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen3-window": transformers.Qwen3Config(**SIZES, **WINDOW, head_dim=8),
    "mistral-window": transformers.MistralConfig(**SIZES, sliding_window=4),
    "granite": transformers.GraniteConfig(**SIZES, logits_scaling=8.0),
    "cohere": transformers.CohereConfig(**SIZES, logit_scale=0.25),
    "cohere2": transformers.Cohere2Config(**SIZES, logit_scale=0.25, sliding_window=4),
    "gemma": transformers.GemmaConfig(**SIZES, head_dim=8),
    "gemma2": transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=1.0),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4),
    "phi3": transformers.Phi3Config(**SIZES, sliding_window=4),
    "olmo2": transformers.Olmo2Config(**SIZES),
    "stablelm": transformers.StableLmConfig(**SIZES),
    "smollm3": transformers.SmolLM3Config(**SIZES),
    "gpt2": transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}
REFUSED = {
    "llama-dynamic": "rope_type is 'dynamic'",
    "llama-gelu": "hidden_act = gelu is not supported",
    "llama-mlp-bias": "mlp_bias = True is not supported",
    "qwen2-window": "use_sliding_window = True is not supported",
    "qwen3-window": "use_sliding_window = True is not supported",
    **{
        name: f"model_type is '{config.model_type}'"
        for name, config in FAMILIES.items()
        if config.model_type not in ("llama", "qwen2", "qwen3")
    },
}
GROUPS = [
    Group(
        [
            Rollout.single_turn([1, 5, 9], [4, 4, 4, 7, 8, 2, 1]),
            Rollout.single_turn([1, 5, 9], [2, 9, 9, 1, 30, 31]),
        ],
        [0.0, 1.0],
        0,
    ),
    Group(
        [
            Rollout.single_turn([3], [8]),
            Rollout.single_turn([3], [20, 21, 22, 23, 24, 25, 26, 27, 28]),
        ],
        [0.0, 1.0],
        0,
    ),
]


@pytest.mark.parametrize("name", list(FAMILIES))
def test_it_is_exact_or_refused_by_name(name: str, tmp_path: Path) -> None:
    model = save_random(FAMILIES[name], tmp_path, seed=4)
    if name in REFUSED:
        tuning = StartTuning(model=str(tmp_path), settings=TuningSettings(), data="unread")
        for use in (
            lambda: make_engine("native", tmp_path),
            lambda: Scorer(model),
            lambda: trio.run(SftService().start, tuning),
        ):
            with pytest.raises(UserError, match=REFUSED[name]):
                use()
        return
    rollouts = [rollout for group in GROUPS for rollout in group.rollouts]
    sequences = [(list(rollout.prompt), rollout.model_tokens) for rollout in rollouts]
    expected, logits = [], []
    for prompt, completion in sequences:
        with torch.no_grad():
            found = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        logits.append(found)
        chosen = torch.log_softmax(found, -1)[range(len(completion)), completion]
        expected.append(chosen)
    batch = make_batch(GROUPS, Objective())
    for passes in (lay_out(batch, "padded"), lay_out(batch, "packed"), lay_out_flat(batch)):
        scored = torch.empty(batch.token_count())
        for rows in passes:
            scored[rows.index] = Scorer(model)(rows)[0].detach()
        torch.testing.assert_close(scored, torch.cat(expected), atol=1e-4, rtol=0)
    engine = make_engine("native", tmp_path)
    prefill = prefill_completions(engine, *map(list, zip(*sequences, strict=True)))
    for states, theirs in zip(prefill.states, logits, strict=True):
        torch.testing.assert_close(engine.logits(states), theirs, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rms_norm_eps": None}, "rms_norm_eps is None; it must be a number above 0"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None; it must be a whole"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; it must be a whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide"),
        ({"head_dim": 7}, "head_dim is 7; it must be an even whole number"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; it must be a number above 0"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "low_freq_factor is None"),
        ({"rope_scaling": "yarn"}, "factor is None"),
        ({"layer_types": ["sliding_attention"]}, "layer_types = .* is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .* is not supported"),
    ],
)
def test_a_config_that_lacks_something_is_a_sentence(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    fine = {**SIZES, "model_type": "llama", "rms_norm_eps": 1e-6}
    assert why_unsupported(fine) is None
    (tmp_path / "config.json").write_text(json.dumps({**fine, **change}))
    with pytest.raises(UserError, match=f"config.json: {sentence}"):
        make_engine("native", tmp_path)
