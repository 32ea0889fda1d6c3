"""Whether a checkpoint is one of the model that is loaded, before its tensors are read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from peers.engines.architecture import Architecture, describe, is_described
from peers.engines.config import read_text_config
from peers.engines.embedding_and_head import EmbeddingAndHead
from peers.engines.experts import fuse_experts
from peers.engines.layers import Layers
from peers.engines.model import open_weights
from peers.engines.weights import Weights
from swarm.errors import UserError


def check_shapes(model: Architecture, folder: Path) -> None:
    """Raise `UserError` unless a folder's headers have the model's names and shapes."""
    meta = torch.device("meta")
    _, shapes = open_weights(folder)
    empty = {name: torch.empty(shape, device=meta) for name, shape in shapes.items()}
    weights = Weights(model, fuse_experts(empty), str(folder), meta, None)
    EmbeddingAndHead(weights)
    Layers(weights, range(len(model.windows)), None)
    weights.check_all_taken()


SAID_ONLY = frozenset(
    (
        *("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    )
)
"""Fields of a config that change nothing about what a loaded model computes."""


def facts_of(folder: Path) -> dict[str, Any]:
    """What a folder's config says of what its model computes; raises `UserError`."""
    config = read_text_config(folder)
    if is_described(config):
        return vars(describe(config))
    return {name: value for name, value in config.items() if name not in SAID_ONLY}


def check_same(facts: Mapping[str, Any], folder: Path) -> None:
    """Raise `UserError` unless the model in `folder` is the one loaded, of which `facts` are."""
    found = facts_of(folder)
    changed = sorted(
        name for name in found.keys() | facts.keys() if found.get(name) != facts.get(name)
    )
    if changed:
        raise UserError(f"{folder} holds another model than the one loaded: {changed[0]} differs")
