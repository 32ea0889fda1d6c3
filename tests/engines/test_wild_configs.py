"""A config with any value in any field is described or refused in one sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peers.engines.config import why_unsupported
from peers.engines.families import FAMILIES

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
            problem = why_unsupported({**CONFIG, "model_type": family, field: value})
            assert problem is None or (len(problem) < 500 and "\n" not in problem)


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
    assert problem in str(why_unsupported(config))
