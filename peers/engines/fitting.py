"""Whether a checkpoint is one of the model that is loaded, before its tensors are read."""

from __future__ import annotations

from pathlib import Path

import torch

from peers.engines.architecture import Architecture, describe
from peers.engines.config import read_supported_config
from peers.engines.embedding_and_head import EmbeddingAndHead
from peers.engines.experts import fuse_experts
from peers.engines.layers import Layers
from peers.engines.model import open_weights
from peers.engines.weights import Weights
from swarm.errors import UserError


def check_shapes(model: Architecture, folder: Path) -> None:
    """Raise `UserError` unless the weights in `folder` are those of the model, in names and shapes.

    Reads the files' headers only.
    """
    meta = torch.device("meta")
    _, shapes = open_weights(folder)
    empty = {name: torch.empty(shape, device=meta) for name, shape in shapes.items()}
    weights = Weights(model, fuse_experts(empty), str(folder), meta, None)
    EmbeddingAndHead(weights)
    Layers(weights, range(len(model.layers)), {})
    weights.check_all_taken()


def check_same(loaded: Architecture, folder: Path) -> None:
    """Raise `UserError` unless the model in `folder` is the one loaded."""
    found = describe(read_supported_config(folder))
    changed = [name for name, value in vars(found).items() if value != vars(loaded)[name]]
    if changed:
        raise UserError(f"{folder} holds another model than the one loaded: {changed[0]} differs")
