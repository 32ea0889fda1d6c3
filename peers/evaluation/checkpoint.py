"""What an evaluation must know of a checkpoint's folder: its identity and its stop ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import blake3

from peers.engines.model import weight_files
from swarm.errors import UserError

NAMED = ("config.json", "tokenizer.json", "adapter_config.json")
"""Files that change what a checkpoint answers, beside its weights."""


def checkpoint_hash(folder: Path) -> str:
    """BLAKE3-256 of weights, config and tokenizer, hex; of an adapter its base counts too.

    Raises `UserError` for a folder without weights.
    """
    own = [folder / name for name in NAMED if (folder / name).exists()]
    files = {
        path.resolve(): path for path in [*weight_files(folder), *folder.glob("*.safetensors")]
    }
    hasher = blake3.blake3()
    for path in [*own, *(files[key] for key in sorted(files, key=lambda key: key.name))]:
        each = blake3.blake3()
        each.update_mmap(path)
        hasher.update(path.name.encode() + b"\0" + each.digest())
    return hasher.hexdigest()


def stop_ids_of(folder: Path) -> list[int]:
    """Stop ids that the checkpoint's model names; raises `UserError` when it names none."""
    stops: Any = None
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if stops is None and path.exists():
            stops = json.loads(path.read_bytes()).get("eos_token_id")
    if stops is None:
        raise UserError(f"{folder} names no eos_token_id; completions would never end")
    return stops if isinstance(stops, list) else [stops]
