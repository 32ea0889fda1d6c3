"""Which files of a model folder hold its weights."""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from peers.engines.demo import make_policy
from peers.engines.loading import load
from peers.engines.model import INDEX_FILE, read_weights, weight_files
from peers.engines.native import NativeEngine
from swarm.errors import UserError


def names(folder: Path) -> list[str]:
    return [path.name for path in weight_files(folder)]


def shard(folder: Path) -> dict[str, torch.Tensor]:
    """Cut a model into two files with an index; return its weights."""
    weights = read_weights(folder)
    (folder / "model.safetensors").unlink()
    found: dict[str, str] = {}
    for number, part in enumerate((sorted(weights)[::2], sorted(weights)[1::2])):
        name = f"model-{number + 1:05}-of-00002.safetensors"
        tensors = {each: weights[each] for each in part}
        safetensors.torch.save_file(tensors, folder / name, metadata={"format": "pt"})
        found |= dict.fromkeys(part, name)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": found}))
    return weights


@pytest.mark.parametrize("is_sharded", [False, True])
def test_files_beside_the_models_are_left_alone(is_sharded: bool, tmp_path: Path) -> None:
    """Mistral publishes `consolidated.safetensors`, with other names, beside the same model."""
    make_policy(tmp_path, seed=1)
    before = shard(tmp_path) if is_sharded else read_weights(tmp_path)
    for name in ("consolidated.safetensors", "vae.safetensors"):
        safetensors.torch.save_file({"layers.0.wq": torch.ones(2)}, tmp_path / name)
    assert len(names(tmp_path)) == 1 + is_sharded and "vae.safetensors" not in names(tmp_path)
    after = read_weights(tmp_path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    NativeEngine(tmp_path)
    load(tmp_path)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ("{", "is no index of safetensors files"),
        ([], "is no index of safetensors files"),
        ({"weight_map": [1]}, "is no index of safetensors files"),
        ({"weight_map": {"a": 7}}, "is no index of safetensors files"),
        ({"weight_map": {"a": "../secret.safetensors"}}, "which is no safetensors file beside it"),
        ({"weight_map": {"a": "weights.bin"}}, "which is no safetensors file beside it"),
        ({"weight_map": {"a": "model-00001.safetensors"}}, "which is missing; get the whole model"),
        ({"weight_map": {}}, "names no file"),
    ],
)
def test_a_wrong_index_is_a_sentence(index: Any, sentence: str, tmp_path: Path) -> None:
    text = index if isinstance(index, str) else json.dumps(index)
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(UserError, match=sentence):
        weight_files(tmp_path)


def test_files_without_an_index_are_all_the_models(tmp_path: Path) -> None:
    wanted: Sequence[str] = ["a.safetensors", "b.safetensors"]
    for name in wanted:
        safetensors.torch.save_file({name: torch.ones(1)}, tmp_path / name)
    assert names(tmp_path) == wanted


@pytest.mark.parametrize(("folder_mode", "mode"), [(0o755, 0o644), (0o700, 0o600)])
def test_a_policy_is_as_readable_as_its_folder(folder_mode: int, mode: int, tmp_path: Path) -> None:
    """safetensors makes files for their owner alone, so that no web server could serve a policy."""
    folder = tmp_path / "policy"
    folder.mkdir(mode=folder_mode)
    make_policy(folder, seed=1)
    assert stat.S_IMODE((folder / "model.safetensors").stat().st_mode) == mode
