"""The models that the native engine computes: what one config asks for. Imports no torch.

`describe` turns a config into an `Architecture`, which the decoder computes and the trainer reads
for windows. It takes plain configs of the families in `FAMILIES` only; whatever else a config says,
transformers' own module computes it (`general`), and nothing is lost but speed."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm.data import beside

Config = Mapping[str, Any]

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, by their names in a config's `layer_types`."""

SIZE_MAX = 2**31 - 1
"""Largest size in a config; the largest known, of vocabularies, is below a million."""

LAYERS_MAX = 10_000
"""Most layers; the deepest known models have about a hundred. Each costs memory here."""


@dataclass(frozen=True)
class Family:
    """What one value of `model_type` computes."""

    title: str
    notes: str = ""
    """The features beyond Llama's, in a few words; for the documentation."""
    windows: bool = False
    """Whether layers may have windows."""
    windows_by_switch: bool = False
    """Whether windows count only with `use_sliding_window`."""
    lists_kinds: bool = False
    """Whether `layer_types` says which layers have the window; else all have it."""
    query_bias: bool = False
    head_norms: bool = False
    sparse: bool = False


FAMILIES = beside(__file__, dict[str, Family])
"""By `model_type`, from `architecture.toml`."""


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that replaces each layer's MLP."""

    count: int
    chosen: int
    """Experts per token."""
    inner_size: int
    normalised: bool
    """Whether the weights of a token's chosen experts are scaled to a sum of 1."""


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
    windows: tuple[int | None, ...]
    """Per layer: a token attends to this many tokens, itself included; None: to all before it."""
    experts: Experts | None
    """None: dense MLPs."""
    rope: Mapping[str, Any]
    """Parameters of the rotary embedding, with `rope_theta` and `rope_type`."""
    epsilon: float
    tied: bool
    """Whether the head is the embedding."""
    query_bias: bool
    """Whether queries, keys and values have a bias."""
    head_norms: bool
    """Whether each head's queries and keys are normalised."""


class Unsupported(ValueError):
    """A config that the native engine does not compute; the text says what in it, in a clause."""


def describe(config: Config) -> Architecture:
    """The architecture that a config asks for; raises `Unsupported` for any that is not exact."""
    name = config.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if not isinstance(name, str) or family is None:
        raise Unsupported(f"model_type is {name!r:.100}")
    _refuse_variants(config)
    count = _size(config, "num_hidden_layers", LAYERS_MAX)
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    # What a config may leave out is what transformers fills in alike for all families with it.
    given = family.head_norms or config.get("head_dim") is not None
    head_size = _size(config, "head_dim") if given else hidden // heads
    _need(head_size % 2 == 0 and (given or head_size * heads == hidden), config, "head_dim")
    given = name != "llama" or config.get("num_key_value_heads") is not None
    kv_heads = _size(config, "num_key_value_heads") if given else heads
    _need(heads % kv_heads == 0, config, "num_key_value_heads")
    _need(is_positive(config.get("rms_norm_eps")), config, "rms_norm_eps")
    return Architecture(
        family=name,
        vocabulary_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size"),
        length_max=_size(config, "max_position_embeddings"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        windows=_windows(config, family, count),
        experts=_experts(config) if family.sparse else None,
        rope=_rope(config),
        epsilon=config["rms_norm_eps"],
        tied=bool(config.get("tie_word_embeddings", False)),
        query_bias=family.query_bias,
        head_norms=family.head_norms,
    )


def is_described(config: Config) -> bool:
    """Whether the native engine computes a model; of any other the general engine finds out."""
    try:
        describe(config)
    except Unsupported:
        return False
    return True


def is_positive(value: object) -> bool:
    """Whether `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value <= sys.float_info.max


def _need(fine: bool, config: Config, name: str) -> None:
    if not fine:
        raise Unsupported(f"{name} is {config.get(name)!r:.100}")


def _size(config: Config, name: str, most: int = SIZE_MAX) -> int:
    size = config.get(name)
    _need(type(size) is int and 1 <= size <= most, config, name)
    return int(size)  # type: ignore[arg-type]


def _refuse_variants(config: Config) -> None:
    for name in ("mlp_bias", "attention_bias", "quantization_config"):
        _need(not config.get(name), config, name)
    _need(config.get("hidden_act", "silu") == "silu", config, "hidden_act")


def _windows(config: Config, family: Family, count: int) -> tuple[int | None, ...]:
    window, listed = None, config.get("layer_types")
    if family.windows and (config.get("use_sliding_window") or not family.windows_by_switch):
        _need("sliding_window" in config, config, "sliding_window")
        window = None if config["sliding_window"] is None else _size(config, "sliding_window")
    kind = FULL if window is None else SLIDING
    if family.lists_kinds and window is not None:
        _need(isinstance(listed, list) and len(listed) == count, config, "layer_types")
        _need(all(each in (FULL, SLIDING) for each in listed or ()), config, "layer_types")
    else:
        _need(not listed or listed == [kind] * count, config, "layer_types")
        listed = [kind] * count
    return tuple(window if each == SLIDING else None for each in listed or ())


def _experts(config: Config) -> Experts:
    named = "num_local_experts" if "num_local_experts" in config else "num_experts"
    count, chosen = _size(config, named), _size(config, "num_experts_per_tok")
    _need(chosen <= count, config, "num_experts_per_tok")
    _need(not config.get("mlp_only_layers"), config, "mlp_only_layers")
    _need(config.get("decoder_sparse_step", 1) == 1, config, "decoder_sparse_step")
    inner = _size(config, "moe_intermediate_size")
    return Experts(count, chosen, inner, bool(config.get("norm_topk_prob", False)))


_ROPE_NEEDS: dict[object, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
"""Parameters that each supported `rope_type` needs in addition to `rope_theta`."""

_ROPE_MAY_HAVE = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
"""Numbers that yarn reads if they are given."""


def _rope(config: Config) -> dict[str, Any]:
    """The rotary embedding: `rope_parameters` (transformers 5), or `rope_theta`, `rope_scaling`."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    found = config.get(name) or {}
    _need(isinstance(found, Mapping), config, name)
    kind = found.get("rope_type", found.get("type", "default"))
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **found, "rope_type": kind}
    _need(isinstance(kind, str) and kind in _ROPE_NEEDS, rope, "rope_type")
    for each in ("rope_theta", *_ROPE_NEEDS[kind]):
        _need(is_positive(rope.get(each)), rope, each)
    for each in _ROPE_MAY_HAVE:
        _need(rope.get(each) in (None, 0) or is_positive(rope[each]), rope, each)
    if kind == "llama3":
        _need(rope["low_freq_factor"] < rope["high_freq_factor"], rope, "low_freq_factor")
    _need(rope.get("partial_rotary_factor", 1.0) == 1.0, rope, "partial_rotary_factor")
    return rope
