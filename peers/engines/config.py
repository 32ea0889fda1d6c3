"""A model's config.json, and whether Swarm computes that model correctly. Imports no torch.

The generation engine, the validator's prefill, the trainer's scorer, `swarm sft` and
`swarm run create` all use this check. If one of them would compute a model differently from
transformers, all of them refuse it and name the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.errors import UserError

FAMILIES = ("llama", "qwen2", "qwen3")
"""Supported values of `model_type`. Other families may scale or cap the logits (Cohere, Granite,
Gemma 2) or use sliding-window layers; neither the engine nor the scorer computes these."""

ROPE_NEEDS: dict[object, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
"""Parameters that each supported `rope_type` needs in addition to `rope_theta`."""

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json; raises `UserError` when it is missing or broken."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"model config {path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"model config {path} is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"model config {path} is not a JSON object")
    return config


def read_supported_config(folder: Path) -> dict[str, Any]:
    """The config of a supported model; raises `UserError` with the reason for any other."""
    config = read_config(folder)
    problem = why_unsupported(config)
    if problem is not None:
        raise UserError(f"model config {folder / 'config.json'}: {problem}")
    return config


def why_unsupported(config: Mapping[str, Any]) -> str | None:
    """One sentence that says why a model with this config is refused; None if it is supported."""
    family = config.get("model_type")
    if family not in FAMILIES:
        return f"model_type is {family!r}; the families supported are {', '.join(FAMILIES)}"
    for name in SIZES:
        size = config.get(name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            return f"{name} is {size!r}; it must be a whole number of at least 1"
    epsilon = config.get("rms_norm_eps")
    if not _is_positive(epsilon):
        return f"rms_norm_eps is {epsilon!r}; it must be a number above 0"
    return _unsupported_variant(config) or _bad_heads(config) or _bad_rope(rope_parameters(config))


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the rotary embedding, always with `rope_theta` and `rope_type`.

    transformers 5 writes `rope_parameters`; older folders have `rope_theta` and `rope_scaling`.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        found = {"rope_type": found}
    kind = found.get("rope_type", found.get("type", "default"))
    return {"rope_theta": config.get("rope_theta", 10000.0), **found, "rope_type": kind}


def _unsupported_variant(config: Mapping[str, Any]) -> str | None:
    """A sentence about the first field that selects an unsupported variant, or None."""
    layers = config.get("layer_types") or []
    unsupported = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "layer_types": any(layer != "full_attention" for layer in layers),
        "mlp_bias": bool(config.get("mlp_bias")),
        "quantization_config": config.get("quantization_config") is not None,
    }
    for field, asked in unsupported.items():
        if asked:
            return f"{field} = {str(config[field])[:100]} is not supported; use another model"
    return None


def _bad_heads(config: Mapping[str, Any]) -> str | None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    shared = config.get("num_key_value_heads") or heads
    if not isinstance(shared, int) or shared < 1 or heads % shared:
        return f"num_key_value_heads is {shared!r}; it must divide num_attention_heads ({heads})"
    size = config.get("head_dim") or hidden / heads
    if size < 2 or size % 2:
        return f"head_dim is {size:g}; it must be an even whole number"
    return None


def _bad_rope(parameters: Mapping[str, Any]) -> str | None:
    kind = parameters["rope_type"]
    if kind not in ROPE_NEEDS:
        return f"rope_type is {kind!r}; the types supported are {', '.join(map(str, ROPE_NEEDS))}"
    for name in ("rope_theta", *ROPE_NEEDS[kind]):
        if not _is_positive(parameters.get(name)):
            return f"{name} is {parameters.get(name)!r}; it must be a number above 0"
    share = parameters.get("partial_rotary_factor", 1.0)
    if share != 1.0:
        return f"partial_rotary_factor = {share!r} is not supported; use another model"
    return None


def _is_positive(value: object) -> bool:
    """Whether `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and value > 0
