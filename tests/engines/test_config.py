"""A model that would be computed wrongly is refused by name, by engine, scorer and tuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
import trio

from peers.engines.config import CONFIG_BYTES_MAX, read_config, why_unsupported
from peers.engines.native import NativeEngine
from peers.learning.scorer import Scorer
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
            transformers.CohereConfig(**SIZES, logit_scale=0.25),
            transformers.Cohere2Config(**SIZES, logit_scale=0.25, sliding_window=4),
            transformers.MixtralConfig(**SIZES, num_local_experts=2),
            transformers.Phi3Config(**SIZES, sliding_window=4),
            transformers.Olmo2Config(**SIZES),
            transformers.StableLmConfig(**SIZES),
            transformers.SmolLM3Config(**SIZES),
            transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        )
    },
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_every_use_refuses_by_name(name: str, tmp_path: Path) -> None:
    config, sentence = REFUSED[name]
    model = save_random(config, tmp_path, seed=4)
    tuning = StartTuning(model=str(tmp_path), settings=TuningSettings(), data="unread")
    for use in (
        lambda: NativeEngine(tmp_path),
        lambda: Scorer(model),
        lambda: trio.run(Tuning().start, tuning),
    ):
        with pytest.raises(UserError, match=sentence):
            use()


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
    assert why_unsupported(fine) is None
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
