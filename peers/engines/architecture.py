"""What one config asks for: the architecture of a model, checked. Imports no torch.

`describe` turns a config into an `Architecture`, which the decoder computes layer by layer and the
trainer reads for windows. Where a config leaves a field out, the default is the
one of transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peers.engines.families import (
    ACTIVATIONS,
    DEFAULTS,
    FAMILIES,
    FULL,
    SLIDING,
    Config,
    Family,
)


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that replaces a layer's MLP."""

    count: int
    chosen: int
    """Experts per token."""
    inner_size: int
    normalised: bool
    """Whether the weights of a token's chosen experts are scaled to a sum of 1."""
    shared_inner_size: int | None
    """Inner size of an expert that sees every token, behind a gate of its own; None: there is
    none."""


@dataclass(frozen=True)
class Layer:
    """What distinguishes one layer from another."""

    kind: str
    """`FULL` or `SLIDING`; it selects the rotary embedding and the mask."""
    window: int | None
    """A token attends to this many tokens, itself included; None: to all before it."""
    experts: Experts | None
    """None: a dense MLP."""


@dataclass(frozen=True)
class Architecture:
    """All that the mathematics of a model depends on, besides its weights."""

    family: str
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    """Inner size of a dense MLP."""
    length_max: int
    heads: int
    kv_heads: int
    head_size: int
    layers: tuple[Layer, ...]
    ropes: Mapping[str, Mapping[str, Any]]
    """Parameters of the rotary embedding by kind of layer, each with `rope_theta`, `rope_type`."""
    epsilon: float
    activation: str
    tied: bool
    """Whether the head is the embedding."""
    query_bias: bool
    """Whether queries, keys and values have a bias."""
    output_bias: bool
    """Whether the attention's output has a bias."""
    head_norms: bool
    """Whether each head's queries and keys are normalised."""
    norm_adds_one: bool
    """Whether norms multiply by 1 + weight, in fp32."""
    outer_norms: bool
    """Whether attention and MLP are normalised after they are computed, too."""
    query_scale: float
    """The factor of query · key."""
    embedding_scale: float
    rounds_embedding_scale: bool
    """Whether the embedding's scale is rounded to the model's dtype first."""
    residual_scale: float
    attention_cap: float | None
    """c: an attention score s becomes c · tanh(s / c); None: it stays s."""
    logits_cap: float | None
    """The same for logits."""
    logits_divisor: float


class Unsupported(ValueError):
    """A model that Swarm would compute wrongly; its text is a sentence without a full stop."""


def family_of(config: Config) -> Family | None:
    """The described family of a config; None for any other, whatever `model_type` holds."""
    name = config.get("model_type")
    return FAMILIES.get(name) if isinstance(name, str) else None


def describe(config: Config) -> Architecture:
    """The architecture that a config asks for; raises `Unsupported` for any that is not exact."""
    name = config.get("model_type")
    family = family_of(config)
    if not isinstance(name, str) or family is None:
        raise Unsupported(
            f"model_type is {_shown(name)}, which is not supported; the families supported are "
            f"{', '.join(FAMILIES)}"
        )
    filled = _fill(config, family)
    _refuse_variants(filled)
    heads, kv_heads, head_size = _heads(filled)
    scale = filled["query_pre_attn_scalar"] ** -0.5 if "query_pre_attn_scalar" in filled else None
    return Architecture(
        family=name,
        vocabulary_size=filled["vocab_size"],
        hidden_size=filled["hidden_size"],
        intermediate_size=filled["intermediate_size"],
        length_max=filled["max_position_embeddings"],
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        layers=_layers(filled, family),
        ropes=_ropes(config, family),
        epsilon=filled["rms_norm_eps"],
        activation=_activation(filled, family),
        tied=bool(filled["tie_word_embeddings"]),
        query_bias=family.always_query_bias or bool(filled["attention_bias"]),
        output_bias=family.output_bias and bool(filled["attention_bias"]),
        head_norms=family.head_norms,
        norm_adds_one=family.gemma,
        outer_norms=family.outer_norms,
        query_scale=scale or filled.get("attention_multiplier") or head_size**-0.5,
        embedding_scale=(
            filled["hidden_size"] ** 0.5
            if family.gemma
            else float(filled.get("embedding_multiplier", 1.0))
        ),
        rounds_embedding_scale=family.gemma,
        residual_scale=float(filled.get("residual_multiplier", 1.0)),
        attention_cap=filled.get("attn_logit_softcapping"),
        logits_cap=filled.get("final_logit_softcapping"),
        logits_divisor=float(filled.get("logits_scaling", 1.0)),
    )


# --- reading a config ------------------------------------------------------------------------

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)

SIZE_MAX = 2**31 - 1
"""Largest size in a config; the largest known, of vocabularies, is below a million."""

LAYERS_MAX = 10_000
"""Most layers; the deepest known models have about a hundred. Each costs memory here."""

_POSITIVE = (
    "rms_norm_eps",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
"""Fields that are numbers above 0 in every family that reads them."""

_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Fields that are null or a number above 0."""


def _fill(config: Config, family: Family) -> dict[str, Any]:
    """The config with all defaults; raises `Unsupported` for a wrong value."""
    filled: dict[str, Any] = {**DEFAULTS, **family.defaults, **config}
    if "qkv_bias" in filled and family.shares_expert:  # the name in Qwen 2 MoE
        filled["attention_bias"] = filled["qkv_bias"]
    if "num_local_experts" in filled:  # the name that transformers 5 writes
        filled["num_experts"] = filled["num_local_experts"]
    experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    sizes = (*_SIZES, *(experts if family.sparse else ()))
    if family.shares_expert:
        sizes = (*sizes, "shared_expert_intermediate_size")
    for name in sizes:
        most = LAYERS_MAX if name == "num_hidden_layers" else SIZE_MAX
        _check_size(name, filled.get(name), most)
    for name in ("sliding_window_pattern", "decoder_sparse_step"):
        if name in family.defaults:
            _check_size(name, filled[name])
    if "max_window_layers" in family.defaults and filled["max_window_layers"] != 0:
        _check_size("max_window_layers", filled["max_window_layers"])
    dense = filled.get("mlp_only_layers")
    if family.sparse and dense is not None and not isinstance(dense, list):
        raise Unsupported(f"mlp_only_layers is {_shown(dense)}; it must be null or a list")
    read = {"rms_norm_eps", *family.defaults}
    for name in (each for each in _POSITIVE if each in read):
        if not is_positive(filled.get(name)):
            raise Unsupported(f"{name} is {_shown(filled.get(name))}; it must be a number above 0")
    for name in _CAPS:
        cap = filled.get(name)
        if cap is not None and not is_positive(cap):
            raise Unsupported(f"{name} is {_shown(cap)}; it must be null or a number above 0")
        if cap is not None and name not in family.defaults:
            _refuse_cap(name, cap, filled["model_type"])
    for name in _POSITIVE:
        if name not in read:
            filled.pop(name, None)  # transformers ignores it, too
    return filled


def _refuse_cap(name: str, cap: object, family: str) -> None:
    if family == "gemma3_text" and name == "final_logit_softcapping":
        return  # Gemma 3 reads this one
    raise Unsupported(f"{name} = {cap!r} is not supported in {family}; use another model")


def _check_size(name: str, size: object, most: int = SIZE_MAX) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise Unsupported(f"{name} is {_shown(size)}; it must be a whole number of at least 1")
    if size > most:
        raise Unsupported(f"{name} is {_shown(size)}; it must be at most {most}")


def _shown(value: object) -> str:
    """The beginning of a value of a config, for a sentence."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def _refuse_variants(config: Config) -> None:
    """Raise `Unsupported` for the first field that selects an unsupported variant."""
    unsupported = {
        "mlp_bias": bool(config.get("mlp_bias")),
        "use_bidirectional_attention": bool(config.get("use_bidirectional_attention")),
        "quantization_config": config.get("quantization_config") is not None,
    }
    for name, asked in unsupported.items():
        if asked:
            raise Unsupported(
                f"{name} = {str(config[name])[:100]} is not supported; use another model"
            )


def _activation(config: Config, family: Family) -> str:
    field = "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"
    name = config[field]
    if family.gemma and field == "hidden_act" and name == "gelu":
        return "gelu_pytorch_tanh"  # transformers: Gemma's "gelu" always meant the approximation
    if name not in ACTIVATIONS:
        raise Unsupported(f"{field} = {name} is not supported; use another model")
    return str(name)


def _heads(config: Config) -> tuple[int, int, int]:
    """(heads, key and value heads, head size)"""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    shared = config["num_key_value_heads"] or heads
    if isinstance(shared, bool) or not isinstance(shared, int) or shared < 1 or heads % shared:
        raise Unsupported(
            f"num_key_value_heads is {_shown(shared)}; it must divide num_attention_heads ({heads})"
        )
    size = config["head_dim"] or hidden / heads
    if not is_positive(size) or not 2 <= size <= SIZE_MAX or size % 2:
        raise Unsupported(f"head_dim is {_shown(size)}; it must be an even whole number")
    return heads, shared, int(size)


def _layers(config: dict[str, Any], family: Family) -> tuple[Layer, ...]:
    count = config["num_hidden_layers"]
    if family.windows_by_switch and not config["use_sliding_window"]:
        config["sliding_window"] = None
    kinds = list(family.kinds(config)) if family.kinds else [FULL] * count
    listed = config.get("layer_types")
    if listed:
        if not isinstance(listed, list) or len(listed) != count:
            raise Unsupported(f"layer_types must list {count} layers")
        other = [kind for kind in listed if kind not in (FULL, SLIDING)]
        if other or (listed != kinds and not family.lists_kinds):
            raise Unsupported(
                f"layer_types = {str(other or listed)[:100]} is not supported; use another model"
            )
        kinds = listed
    window = config["sliding_window"]
    if SLIDING in kinds:
        if window is None:
            raise Unsupported("layer_types has sliding layers, but there is no sliding_window")
        _check_size("sliding_window", window)
    experts = _experts(config, family)
    return tuple(
        Layer(kind, window if kind == SLIDING else None, experts[index])
        for index, kind in enumerate(kinds)
    )


def _experts(config: Config, family: Family) -> list[Experts | None]:
    count = config["num_hidden_layers"]
    if not family.sparse:
        return [None] * count
    step, dense = config["decoder_sparse_step"], config["mlp_only_layers"] or []
    if config["num_experts_per_tok"] > config["num_experts"]:
        raise Unsupported(
            f"num_experts_per_tok is {config['num_experts_per_tok']}; there are "
            f"{config['num_experts']} experts"
        )
    experts = Experts(
        count=config["num_experts"],
        chosen=config["num_experts_per_tok"],
        inner_size=config["moe_intermediate_size"],
        normalised=bool(config["norm_topk_prob"]),
        shared_inner_size=(
            config["shared_expert_intermediate_size"] if family.shares_expert else None
        ),
    )
    return [None if index in dense or (index + 1) % step else experts for index in range(count)]


# --- the rotary embedding --------------------------------------------------------------------

_ROPE_NEEDS: dict[object, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
"""Parameters that each supported `rope_type` needs in addition to `rope_theta`."""

_ROPE_MAY_HAVE = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
"""Numbers that yarn reads if they are given."""


def _ropes(config: Config, family: Family) -> dict[str, dict[str, Any]]:
    """Parameters of the rotary embedding by kind of layer, checked.

    transformers 5 writes `rope_parameters`; older folders have `rope_theta` and `rope_scaling`.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        found = {"rope_type": found}
    theta = config.get("rope_theta", 10000.0)
    if not family.rope_by_kind:
        shared = _rope(found, theta)
        return {FULL: shared, SLIDING: shared}
    if config.get("rope_parameters"):
        kinds = {kind: found.get(kind) or {} for kind in (FULL, SLIDING)}
    else:  # an older folder scales only the layers without a window
        kinds = {FULL: found, SLIDING: {}}
    return {
        FULL: _rope(kinds[FULL], config.get("rope_theta", 1_000_000.0)),
        SLIDING: _rope(kinds[SLIDING], config.get("rope_local_base_freq", 10000.0)),
    }


def _rope(found: object, theta: object) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise Unsupported(f"the rotary embedding is {_shown(found)}; it must be an object")
    kind = found.get("rope_type", found.get("type", "default"))
    parameters = {"rope_theta": theta, **found, "rope_type": kind}
    if not isinstance(kind, str) or kind not in _ROPE_NEEDS:
        raise Unsupported(
            f"rope_type is {_shown(kind)}; the types supported are "
            f"{', '.join(map(str, _ROPE_NEEDS))}"
        )
    for name in ("rope_theta", *_ROPE_NEEDS[kind]):
        if not is_positive(parameters.get(name)):
            raise Unsupported(
                f"{name} is {_shown(parameters.get(name))}; it must be a number above 0"
            )
    for name in _ROPE_MAY_HAVE:
        if parameters.get(name) not in (None, 0) and not is_positive(parameters[name]):
            raise Unsupported(f"{name} is {_shown(parameters[name])}; it must be a number above 0")
    if kind == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        raise Unsupported("low_freq_factor must be below high_freq_factor")
    share = parameters.get("partial_rotary_factor", 1.0)
    if share != 1.0:
        raise Unsupported(f"partial_rotary_factor = {share!r} is not supported; use another model")
    return parameters


def is_positive(value: object) -> bool:
    """Whether `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value <= sys.float_info.max
