"""The families of models that Swarm computes. Imports no torch.

`FAMILIES` is the capability table: engine, trainer and `swarm sft` read it, and every other family
is refused by name. `peers.engines.architecture` describes one config of a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, by their names in a config's `layer_types`."""

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
"""Supported activations of the MLP, by their names in transformers."""


@dataclass(frozen=True)
class Family:
    """What one value of `model_type` computes."""

    title: str
    notes: str = ""
    """The features beyond Llama's, in a few words; for the documentation."""
    defaults: Config = field(default_factory=dict)
    """Values of fields that a config may leave out, where they differ from `DEFAULTS`."""
    kinds: Callable[[Config], Sequence[str]] | None = None
    """The kind of each layer, if the config does not list them; None: all are `FULL`."""
    lists_kinds: bool = False
    """Whether the family reads `layer_types`."""
    windows_by_switch: bool = False
    """Whether windows count only with `use_sliding_window`."""
    rope_by_kind: bool = False
    """Whether each kind of layer has its own rotary embedding."""
    sparse: bool = False
    shares_expert: bool = False
    always_query_bias: bool = False
    output_bias: bool = True
    """Whether the attention's output has a bias where queries have one."""
    head_norms: bool = False
    gemma: bool = False
    """Scaled embeddings, and norms that multiply by 1 + weight."""
    outer_norms: bool = False


DEFAULTS: Config = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "sliding_window": None,
}
"""Values of fields that a config of any family may leave out."""

_QWEN = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA_WINDOWS = {
    **_GEMMA,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_EXPERTS = {
    "mlp_only_layers": None,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
}


def _everywhere(config: Config) -> list[str]:
    kind = FULL if config["sliding_window"] is None else SLIDING
    return [kind] * config["num_hidden_layers"]


def _after_some(config: Config) -> list[str]:
    windows = config["sliding_window"] is not None
    return [
        SLIDING if windows and index >= config["max_window_layers"] else FULL
        for index in range(config["num_hidden_layers"])
    ]


def _every_other_of_some(config: Config) -> list[str]:
    windows = config["sliding_window"] is not None
    return [
        SLIDING if windows and index % 2 == 0 and index < config["max_window_layers"] else FULL
        for index in range(config["num_hidden_layers"])
    ]


def _every_other(config: Config) -> list[str]:
    return [FULL if index % 2 else SLIDING for index in range(config["num_hidden_layers"])]


def _all_but_every_nth(config: Config) -> list[str]:
    pattern = config["sliding_window_pattern"]
    return [
        SLIDING if (index + 1) % pattern else FULL for index in range(config["num_hidden_layers"])
    ]


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama"),
    "mistral": Family(
        "Mistral",
        "sliding window",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        kinds=_everywhere,
    ),
    "qwen2": Family(
        "Qwen 2 and 2.5",
        "biases of queries, keys and values; sliding windows if switched on",
        defaults=_QWEN,
        kinds=_after_some,
        lists_kinds=True,
        windows_by_switch=True,
        always_query_bias=True,
        output_bias=False,
    ),
    "qwen2_moe": Family(
        "Qwen 1.5 and 2 MoE",
        "as Qwen 2; experts and a shared expert",
        defaults={
            **_QWEN,
            **_EXPERTS,
            "num_key_value_heads": 16,
            "attention_bias": True,
        },
        kinds=_every_other_of_some,
        lists_kinds=True,
        windows_by_switch=True,
        sparse=True,
        shares_expert=True,
        output_bias=False,
    ),
    "qwen3": Family(
        "Qwen 3",
        "norms of queries and keys; sliding windows if switched on",
        defaults={**_QWEN, "head_dim": 128},
        kinds=_after_some,
        lists_kinds=True,
        windows_by_switch=True,
        head_norms=True,
    ),
    "qwen3_moe": Family(
        "Qwen 3 MoE",
        "as Qwen 3; experts",
        defaults={**_EXPERTS, "num_key_value_heads": 4},
        kinds=_everywhere,
        windows_by_switch=True,
        sparse=True,
        head_norms=True,
    ),
    "gemma": Family(
        "Gemma",
        "scaled embeddings, 1 + weight norms, GeGLU",
        defaults={**_GEMMA, "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
        gemma=True,
    ),
    "gemma2": Family(
        "Gemma 2",
        "as Gemma; norms before and after, capped attention and logits, every other layer with a "
        "window",
        defaults={
            **_GEMMA_WINDOWS,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        kinds=_every_other,
        lists_kinds=True,
        gemma=True,
        outer_norms=True,
    ),
    "gemma3_text": Family(
        "Gemma 3 (text)",
        "as Gemma 2 without caps; norms of queries and keys, a rotary base of its own for layers "
        "with a window",
        defaults={**_GEMMA_WINDOWS, "sliding_window_pattern": 6},
        kinds=_all_but_every_nth,
        lists_kinds=True,
        rope_by_kind=True,
        gemma=True,
        head_norms=True,
        outer_norms=True,
    ),
    "granite": Family(
        "Granite",
        "scaled embeddings, residuals, attention and logits",
        defaults={
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
}
"""The capability table: families by `model_type`."""
