"""Adapters with random matrices, beside a base."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from peers.engines.adapter import target_names, write_adapter
from peers.engines.adapter_config import CONFIG_FILE
from peers.engines.model import open_weights
from peers.engines.tokenizer import copy_tokenizer
from swarm.wire.manifest import ADAPTER_TARGETS

ATTENTION = ADAPTER_TARGETS[:4]


def save_random_adapter(
    base: Path,
    folder: Path,
    *,
    rank: int = 3,
    targets: Sequence[str] = ADAPTER_TARGETS,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
) -> Path:
    """An adapter of `base` that changes its policy clearly, unless `size` makes it small."""
    generator = torch.Generator().manual_seed(seed)
    _, shapes = open_weights(base)
    pairs = {}
    for name in target_names(frozenset(targets), shapes):
        rows, columns = shapes[f"{name}.weight"]
        a = torch.randn(rank, columns, generator=generator) / columns**0.5
        b = size * torch.randn(rows, rank, generator=generator) / rank
        pairs[name] = (a.to(dtype), b.to(dtype))
    folder.mkdir(parents=True, exist_ok=True)
    write_adapter(folder, pairs, rank, 2.0 * rank, str(base))
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    copy_tokenizer(base, folder)
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    """Overwrite fields of an adapter's config."""
    path = folder / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
