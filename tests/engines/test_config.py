"""What the native engine takes of a config, and what it leaves to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from peers.engines.architecture import FAMILIES, Unsupported, describe, is_described
from peers.engines.config import CONFIG_BYTES_MAX, read_config
from peers.engines.general import GeneralEngine
from peers.engines.native import NativeEngine
from peers.engines.registry import make_engine
from swarm.errors import UserError
from swarm.jobs import Hardware
from tests.engines.families import EXPERTS, SIZES, WINDOWS, save_random

VARIANTS: dict[str, tuple[Any, str]] = {
    "llama-dynamic": (
        transformers.LlamaConfig(
            **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
        "rope_type is 'dynamic'",
    ),
    "llama-gelu": (transformers.LlamaConfig(**SIZES, hidden_act="gelu"), "hidden_act is 'gelu'"),
    "llama-bias": (transformers.LlamaConfig(**SIZES, attention_bias=True), "attention_bias is Tr"),
    "llama-mlp-bias": (transformers.LlamaConfig(**SIZES, mlp_bias=True), "mlp_bias is True"),
    "qwen3-moe-some": (
        transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, mlp_only_layers=[2]),
        "mlp_only_layers is [2]",
    ),
    "qwen2-moe": (
        transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=20),
        "model_type is 'qwen2_moe'",
    ),
    "gemma3": (transformers.Gemma3TextConfig(**SIZES, head_dim=16), "model_type is 'gemma3_text'"),
}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_variant_is_left_to_transformers(name: str, tmp_path: Path) -> None:
    config, problem = VARIANTS[name]
    save_random(config, tmp_path, seed=4)
    with pytest.raises(UserError) as refused:
        NativeEngine(tmp_path)
    assert problem in str(refused.value) and "leave devices empty" in str(refused.value)
    assert isinstance(make_engine("native", tmp_path, Hardware(device="cpu")), GeneralEngine)


def test_what_was_published_before_transformers_5_is_described() -> None:
    plain = {**CONFIG, "model_type": "llama", "rope_theta": 5e5}
    rope = {"type": "linear", "factor": 2.0}
    assert describe({**plain, "rope_scaling": rope}).rope["rope_type"] == "linear"
    assert describe({**plain, "num_key_value_heads": None}).kv_heads == 4
    windows = {**plain, **WINDOWS, "model_type": "qwen2"}
    assert not is_described(windows), "which layers have the window is not said"
    kinds = ["full_attention", "sliding_attention"] * 2
    assert describe({**windows, "layer_types": kinds}).windows == (None, 5, None, 5)
    assert describe({**windows, "use_sliding_window": False}).windows == (None,) * 4


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
    "rms_norm_eps": 1e-6, "head_dim": 8, "sliding_window": 5, "use_sliding_window": True,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
FIELDS = [
    *CONFIG, "model_type", "hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob", "layer_types", "rope_theta",
    "rope_scaling", "rope_parameters", "num_local_experts", "quantization_config",
]  # fmt: skip
LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 1, "original_max_position_embeddings": 16}
VALUES: list[Any] = [
    None, True, "x", "", [], [1], {}, {"a": 1}, -1, 0, 1, 1.5, float("nan"), 1e308, 10**9, 10**400,
    ["full_attention"] * 4, [{}] * 4, {"rope_type": [1]}, {"full_attention": 3},
    {"rope_type": "yarn", "factor": 2, "beta_fast": "x"},
    {"rope_type": "llama3", "factor": 8, **LLAMA3},
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_is_described_or_named_in_a_clause(family: str) -> None:
    for field in FIELDS:
        for value in VALUES:
            config = {**CONFIG, "model_type": family, field: value}
            try:
                assert len(describe(config).windows) == config["num_hidden_layers"]
            except Unsupported as problem:
                assert len(str(problem)) < 500 and "\n" not in str(problem)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"head_dim": 1e308}, "head_dim is 1e+308"),
        ({"head_dim": None, "num_attention_heads": 6, "num_key_value_heads": 6}, "head_dim is No"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "low_freq_factor is None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8, **LLAMA3}}, "low_freq_factor is 1"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types is ['slid"),
        ({"layer_types": ["full_attention"]}, "layer_types is ['full"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
    ],
)
def test_what_is_not_computed_is_named(changes: dict[str, Any], problem: str) -> None:
    config = json.loads(json.dumps({**CONFIG, "model_type": "llama", **changes}))
    with pytest.raises(Unsupported) as refused:
        describe(config)
    assert str(refused.value).startswith(problem)
