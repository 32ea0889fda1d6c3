"""A model's config.json, read and checked. Imports no torch.

What `architecture` describes the native engine computes itself. Any other model is transformers'
own, and is checked by computing (`general`)."""

import json
import re
from pathlib import Path
from typing import Any

from peers.engines.architecture import LAYERS_MAX, SIZE_MAX, is_described
from swarm.errors import UserError

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number, by dtype."""
CONFIG_BYTES_MAX = 16 << 20
COUNT_MAX = 1024
"""Most layers, experts and the like, of a family that is not described. Each is a module, which is
made before its weights are looked for."""


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json; raises `UserError` when it is missing or broken."""
    return read_object(folder / "config.json", "model", CONFIG_BYTES_MAX)


def read_object(path: Path, kind: str, most: int) -> dict[str, Any]:
    """The JSON object in a config of at most so many bytes; raises `UserError`."""
    try:
        if path.stat().st_size > most:
            raise UserError(f"{kind} config {path} has more than {most} bytes; it is no {kind}'s")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{kind} config {path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{kind} config {path} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise UserError(f"{kind} config {path} is not a JSON object")
    return found


def read_text_config(folder: Path) -> dict[str, Any]:
    """The text part of a model's config, from its file or transformers; raises `UserError`."""
    config = read_config(folder)
    if is_described(config):
        return config
    _refuse_variants(folder, config)
    from transformers import AutoConfig

    try:
        filled = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        text: dict[str, Any] = filled.get_text_config().to_dict()
    except Exception as error:  # a config's values reach all of transformers
        raise UserError(
            f"model {folder} cannot be loaded by transformers ({first_line(error)})"
        ) from error
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
        size = getattr(filled.get_text_config(), name, None)  # some families call it otherwise
        most = LAYERS_MAX if name == "num_hidden_layers" else SIZE_MAX
        if type(size) is not int or not 1 <= size <= most:
            raise UserError(
                f"model config {folder / 'config.json'}: {name} is {size!r:.100}; it must be a "
                f"whole number from 1 to {most}"
            )
        text[name] = size
    if filled.is_encoder_decoder:
        raise UserError(
            f"model {folder} has an encoder beside its decoder ({filled.model_type}), which is not "
            "supported; use a model that only continues its prompt"
        )
    ropes = text.get("rope_parameters") or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            start = rope.get("original_max_position_embeddings")
            if start != text["max_position_embeddings"]:
                raise UserError(
                    f"model {folder} has rotary embeddings of the type longrope: from position "
                    f"{start} on, those of all earlier tokens change, so what was generated "
                    "cannot be checked; use a model without"
                )
    return text


def _refuse_variants(folder: Path, config: dict[str, Any]) -> None:
    """Raise `UserError` for programs of its own, quantisation, or any number of modules."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    known = isinstance(kind, str) and kind in CONFIG_MAPPING  # auto_map is not looked at
    inner: list[Any] = [config]
    while inner:
        found = inner.pop()
        if isinstance(found, list):
            inner += found
        elif isinstance(found, dict):
            inner += found.values()
            # An implementation OWNER/NAME is one that the package kernels would fetch and run.
            programs = [
                name
                for name, value in found.items()
                if (name == "auto_map" and not known)
                or ("_implementation" in name and "/" in str(value))
            ]
            for name, value in found.items():
                counts = value if isinstance(value, list) else [value]
                if (
                    re.search("layer|depth|block|expert|stage", name)
                    and not re.search("size|dim|channels", name)
                    and any(type(each) is int and each > COUNT_MAX for each in counts)
                ):
                    raise UserError(
                        f"model config {folder / 'config.json'}: {name[:100]} is {value!r:.100}; "
                        f"it must be a whole number of at most {COUNT_MAX}"
                    )
            if found.get("quantization_config") is not None:
                raise UserError(
                    f"model {folder} is quantised (quantization_config), which is refused, because "
                    "validators compute with the trainer's own weights; use the model that is not"
                )
            if programs:
                raise UserError(
                    f"model {folder} brings its own programs ({programs[0][:100]}), which are "
                    "never run; use a family that transformers has"
                )


def first_line(error: Exception) -> str:
    """What an error says, for a sentence."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(lines[:2])[:200]}" if lines else type(error).__name__
