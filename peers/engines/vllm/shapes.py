"""Whether a checkpoint fits the model that vLLM has loaded, from its headers alone.

vLLM reloads weights in place: a checkpoint of another shape would leave it half replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors

from peers.engines.config import read_supported_config
from peers.engines.model import weight_files
from swarm.errors import UserError

MAY_DIFFER = frozenset(
    {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "architectures"}
)
"""Fields of config.json that say nothing about the model's mathematics."""

STORED = frozenset({"F32", "F16", "BF16"})
"""Formats of weights that are not quantised, by their names in safetensors."""

Shapes = dict[str, tuple[int, ...]]


def shapes_of(folder: Path) -> Shapes:
    """The shape of every tensor in a model folder.

    Raises `UserError` for a broken file and for quantised weights.
    """
    shapes: Shapes = {}
    for path in weight_files(folder):
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                names = file.keys()
                found = {name: file.get_slice(name) for name in names}
                for name, values in found.items():
                    if values.get_dtype() not in STORED:
                        raise UserError(
                            f"{name} in {folder} is stored as {values.get_dtype()}; quantised "
                            "weights are refused, because validators compute with the trainer's own"
                        )
                shapes |= {name: tuple(values.get_shape()) for name, values in found.items()}
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"{path} is no safetensors file ({error})") from error
    return shapes


def check_same_model(config: Mapping[str, Any], shapes: Shapes, folder: Path) -> None:
    """Raise `UserError` unless `folder` holds other weights of the same model."""
    new = read_supported_config(folder)
    names = {*config, *new} - MAY_DIFFER
    changed = sorted(name for name in names if config.get(name) != new.get(name))
    if changed:
        raise UserError(f"{folder} holds another model than the one loaded: {changed[0]} differs")
    found = shapes_of(folder)
    missing = sorted({*shapes} - {*found})
    if missing:
        raise UserError(f"the weights in {folder} lack {missing[0]}")
    for name, shape in sorted(found.items()):
        if name not in shapes:
            raise UserError(f"the weights in {folder} have {name}, which the model does not know")
        if shape != shapes[name]:
            raise UserError(f"{name} in {folder} has shape {list(shape)}, not {list(shapes[name])}")
