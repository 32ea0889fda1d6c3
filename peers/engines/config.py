"""A model's config.json, read and checked. Imports no torch.

The generation engine, the validator's prefill, the trainer's scorer, `swarm sft` and
`swarm run create` all use this check. If one of them would compute a model differently from
transformers, all of them refuse it and name the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.engines.architecture import Unsupported, describe, family_of
from swarm.errors import UserError

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number, by dtype."""
CONFIG_BYTES_MAX = 16 << 20


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json; raises `UserError` when it is missing or broken."""
    path = folder / "config.json"
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise UserError(
                f"model config {path} has more than {CONFIG_BYTES_MAX} bytes; it is no model's"
            )
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"model config {path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
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


def is_described(config: Mapping[str, Any]) -> bool:
    """Whether a model is of a family that `families.py` describes. Of any other the general engine
    finds out by itself whether it can generate."""
    return family_of(config) is not None


def why_unsupported(config: Mapping[str, Any]) -> str | None:
    """One sentence that says why a model with this config is refused; None if it is supported."""
    try:
        describe(config)
    except Unsupported as problem:
        return str(problem)
    return None
