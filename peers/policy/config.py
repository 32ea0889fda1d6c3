"""What a model's config.json says, and whether Swarm computes such a model right. No torch.

One answer serves the engine that generates, the validator's prefill, the trainer's scorer,
`swarm sft` and `swarm run create`: a model that one of them would compute differently from
transformers is refused by all, by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.errors import UserError

FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of `model_type`. In other families the head may be scaled or capped (Cohere, Granite,
Gemma 2), or layers may see a window only, which neither engine nor scorer computes."""

ROPE_NEEDS: dict[object, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor",),
}
"""Numbers that each supported `rope_type` needs beside `rope_theta`."""

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
    """The config of a model that Swarm computes right; raises `UserError` saying why not."""
    config = read_config(folder)
    problem = why_unsupported(config)
    if problem is not None:
        raise UserError(f"model config {folder / 'config.json'}: {problem}")
    return config


def why_unsupported(config: Mapping[str, Any]) -> str | None:
    """Why a model with this config cannot be used, in one sentence, or None."""
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
    """The parameters of the rotary embedding, `rope_theta` and `rope_type` always among them.

    transformers 5 writes `rope_parameters`; older folders have `rope_theta` and `rope_scaling`.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        found = {"rope_type": found}
    kind = found.get("rope_type", found.get("type", "default"))
    return {"rope_theta": config.get("rope_theta", 10000.0), **found, "rope_type": kind}


def _unsupported_variant(config: Mapping[str, Any]) -> str | None:
    """The first field that asks for something of a supported family that is not computed."""
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
    """Whether this is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and value > 0
