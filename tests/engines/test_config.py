"""A model that would be computed wrongly is refused by name; any config gets a sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
import trio

from peers.engines.architecture import Unsupported, describe
from peers.engines.config import CONFIG_BYTES_MAX, read_config
from peers.engines.families import FAMILIES
from peers.engines.native import NativeEngine
from peers.tuning.service import Tuning
from swarm.errors import UserError
from swarm.jobs.offline import StartTuning, TuningSettings
from tests.engines.families import SIZES, save_random

REFUSED: dict[str, tuple[Any, str]] = {
    "llama-dynamic": (
        transformers.LlamaConfig(
            **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
        "rope_type is 'dynamic'",
    ),
    "llama-relu": (
        transformers.LlamaConfig(**SIZES, hidden_act="relu"),
        "hidden_act = relu is not supported",
    ),
    "llama-mlp-bias": (
        transformers.LlamaConfig(**SIZES, mlp_bias=True),
        "mlp_bias = True is not supported",
    ),
    "gemma3-caps": (
        transformers.Gemma3TextConfig(**SIZES, attn_logit_softcapping=1.0),
        "attn_logit_softcapping = 1.0 is not supported in gemma3_text",
    ),
    "gemma2-both-ways": (
        transformers.Gemma2Config(**SIZES, use_bidirectional_attention=True),
        "use_bidirectional_attention = True is not supported",
    ),
    **{
        config.model_type: (config, f"model_type is '{config.model_type}', which is not supported")
        for config in (
            transformers.MixtralConfig(**SIZES, num_local_experts=2),
            transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        )
    },
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_variant_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Of the families that the native engine describes by every use, of any other by it alone."""
    config, sentence = REFUSED[name]
    save_random(config, tmp_path, seed=4)
    with pytest.raises(UserError, match=sentence):
        NativeEngine(tmp_path)
    if config.model_type in FAMILIES:
        tuning = StartTuning(model=str(tmp_path), settings=TuningSettings(), data="unread")
        with pytest.raises(UserError, match=sentence):
            trio.run(Tuning().start, tuning)


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
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types = .* is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types must list 4 layers"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .* is not supported"),
    ],
)
def test_a_config_that_lacks_something_is_a_sentence(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    fine = {**SIZES, "model_type": "llama", "rms_norm_eps": 1e-6}
    describe(fine)
    (tmp_path / "config.json").write_text(json.dumps({**fine, **change}))
    with pytest.raises(UserError, match=f"config.json: {sentence}"):
        NativeEngine(tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"[]", "is not a JSON object"),
        (b"[" * 200_000, "is not JSON"),
        (b'{"a": ' * 200_000, "is not JSON"),
        (b"\xff\xfe\0", "is not JSON"),
        (b" " * (CONFIG_BYTES_MAX + 1), "has more than 16777216 bytes; it is no model's"),
    ],
    ids=["list", "deep", "deep objects", "binary", "large"],
)
def test_a_config_that_is_none_is_a_sentence(text: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UserError, match=f"config.json {sentence}"):
        read_config(tmp_path)


# --- any value in any field -------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20, "use_sliding_window": True, "sliding_window": 5,
    "max_window_layers": 2,
}  # fmt: skip
FIELDS = [
    *CONFIG, "model_type", "head_dim", "hidden_act", "hidden_activation", "tie_word_embeddings",
    "qkv_bias", "attention_bias", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob",
    "query_pre_attn_scalar", "sliding_window_pattern", "layer_types", "rope_theta", "rope_scaling",
    "rope_parameters", "rope_local_base_freq", "attn_logit_softcapping", "num_local_experts",
    "final_logit_softcapping", "logits_scaling", "attention_multiplier", "mlp_bias",
    "quantization_config",
]  # fmt: skip
LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 1, "original_max_position_embeddings": 16}
VALUES: list[Any] = [
    None, True, "x", "", [], [1], {}, {"a": 1}, -1, 0, 1, 1.5, float("nan"), 1e308, 10**9, 10**400,
    ["full_attention"] * 4, [{}] * 4, {"rope_type": [1]}, {"full_attention": 3},
    {"rope_type": "yarn", "factor": 2, "beta_fast": "x"},
    {"rope_type": "llama3", "factor": 8, **LLAMA3},
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_is_described_or_refused_in_a_sentence(family: str) -> None:
    for field in FIELDS:
        for value in VALUES:
            try:
                describe({**CONFIG, "model_type": family, field: value})
            except Unsupported as problem:
                assert len(str(problem)) < 500 and "\n" not in str(problem)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most 10000"),
        ({"rope_scaling": ["yarn"]}, "rope_type is ['yarn']; the types supported are"),
        ({"rms_norm_eps": 10**400}, "it must be a number above 0"),
        ({"head_dim": 1e308}, "head_dim is 1e+308; it must be an even whole number"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, **LLAMA3}},
            "low_freq_factor must be below high_freq_factor",
        ),
        ({"model_type": ["llama"]}, "model_type is ['llama'], which is not supported"),
    ],
)
def test_wild_values_are_named(changes: dict[str, Any], problem: str) -> None:
    config = json.loads(json.dumps({**CONFIG, "model_type": "llama", **changes}))
    with pytest.raises(Unsupported, match=re.escape(problem)):
        describe(config)
