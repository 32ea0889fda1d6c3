"""Merge checkpoints tensor by tensor, one file of the result in memory. The result has the
first checkpoint's files, dtypes and tokenizer, and appears whole, or not at all."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from peers.engines.adapter_config import base_of, is_adapter
from peers.engines.config import read_text_config
from peers.engines.fitting import facts_of
from peers.engines.model import INDEX_FILE, StoredTensors, weight_files
from peers.engines.tokenizer import check_tokenizer, copy_tokenizer
from peers.learning.durable import whole_folder
from swarm.errors import UserError

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of numbers by their names in safetensors files."""

RECIPE_FILE = "merge.json"
"""What was merged and how, in the folder of the result."""


LENGTHS = {"length_max", "max_position_embeddings"}
"""Facts of a model in which those that are merged may differ."""

_UNCOMPARED = ("truncation", "padding", "version")
"""Parts of tokenizer.json that change no token's meaning."""


class Method(StrEnum):
    """How checkpoints are merged. All but `linear` are mergekit's."""

    linear = "linear"
    """The weighted mean (Model Soups, arXiv 2203.05482)."""
    slerp = "slerp"
    """Between two, along the arc: at the second one's share of the weights."""
    task_arithmetic = "task_arithmetic"
    """The base plus the weighted sum of what each changed (arXiv 2212.04089)."""
    ties = "ties"
    """The same of the largest changes, by elected signs (arXiv 2306.01708)."""
    dare_linear = "dare_linear"
    """The same of random changes, scaled up (arXiv 2311.03099)."""
    dare_ties = "dare_ties"
    model_stock = "model_stock"
    """Between the base and the mean, by the angle of the changes (arXiv 2403.19522)."""

    @property
    def needs_base(self) -> bool:
        return self not in (Method.linear, Method.slerp)


@dataclass(frozen=True)
class Recipe:
    """What to merge, and how."""

    folders: Sequence[Path]
    weights: Sequence[float] = ()
    """One per folder; empty: all equal."""
    method: Method = Method.linear
    base: Path | None = None
    """The checkpoint that all others were trained from, where the method needs it."""
    density: float = 0.5
    """Share of each checkpoint's changes that TIES and DARE keep."""

    @property
    def read(self) -> list[Path]:
        """All folders whose tensors are read, the base last."""
        return [*self.folders, *filter(None, [self.base])]

    @property
    def told(self) -> dict[str, Any]:
        """What the result says of itself."""
        told = {"folders": [str(each.resolve()) for each in self.folders]}
        base = str(self.base.resolve()) if self.base else None
        more = {"method": self.method, "base": base, "density": self.density}
        return {**told, "weights": list(self.weights), **more}

    def apply(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor of the result, fp32, of those of each folder that is `read`."""
        weights = self.weights or [1.0] * len(self.folders)
        if self.method != Method.linear:
            return self._by_mergekit(tensors, weights)
        total = sum(weights)
        merged = tensors[0] * (weights[0] / total)
        for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
            merged.add_(tensor, alpha=weight / total)
        return merged

    def _by_mergekit(self, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        from mergekit.merge_methods.api import merge_tensors

        given: dict[str, Any] = {}
        if self.method == Method.slerp:
            given = {"t": weights[1] / sum(weights)}
        elif self.method != Method.model_stock:
            numbers = dict(enumerate(weights))
            given = {"weight": numbers, "density": dict.fromkeys(numbers, self.density)}
        base = len(tensors) - 1 if self.base else 0
        merged: Tensor = merge_tensors(
            tensors, self.method.value, parameters=given, ids=range(len(tensors)), base_index=base
        )
        return merged


@dataclass(frozen=True)
class Merged:
    parameters: int
    bytes: int


def merge(recipe: Recipe, out: Path, progress: Callable[[int, int], None]) -> Merged:
    """Merge checkpoints into `out`; `progress` gets bytes and their total; raises `UserError`."""
    check(recipe, out)
    stored = [StoredTensors(folder, _is_used(folder)) for folder in recipe.read]
    _check_alike(recipe.read, stored)
    torch.manual_seed(0)  # DARE draws what it drops
    first = stored[0]
    plan: dict[str, list[str]] = {}
    for path in weight_files(recipe.folders[0]):
        with safetensors.safe_open(path, framework="pt") as file:
            plan[path.name] = [name for name in file.keys() if name in first.shapes]  # noqa: SIM118
    total = sum(_size(first, name) for names in plan.values() for name in names)
    _check_room(out, total)
    whole, done = base_of(recipe.folders[0]), 0
    with whole_folder(out) as aside:
        for file_name, names in plan.items():
            tensors = {}
            for name in names:
                tensors[name] = _merged(recipe, stored, name)
                progress(done := done + _size(first, name), total)
            save_file(tensors, aside / file_name, metadata={"format": "pt"})
        (aside / RECIPE_FILE).write_text(json.dumps(recipe.told, indent=1), encoding="utf-8")
        shutil.copyfile(whole / "config.json", aside / "config.json")
        if len(plan) > 1:
            index = {"metadata": {}, "weight_map": {name: at for at in plan for name in plan[at]}}
            (aside / INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")
        copy_tokenizer(whole, aside)
    return Merged(sum(map(prod, first.shapes.values())), total)


def check(recipe: Recipe, out: Path) -> None:
    """Raise `UserError` for options that do not go together."""
    count = len(recipe.folders)
    if count < 2 and not (count == 1 and is_adapter(recipe.folders[0])):
        raise UserError(
            f"{count} checkpoint is given; name two or more to merge, or a single adapter, which "
            "is merged into its base"
        )
    if recipe.weights and len(recipe.weights) != count:
        raise UserError(
            f"--weight is given {len(recipe.weights)} times for {count} checkpoints; give it once "
            "for each, in their order, or leave it out"
        )
    for weight in recipe.weights:
        if not 0 < weight <= 1e6:
            raise UserError(f"--weight is {weight:g}; it must be above 0, and at most 1e6")
    if recipe.method.needs_base != (recipe.base is not None):
        needs = "needs" if recipe.base is None else "takes no"
        raise UserError(
            f"--method {recipe.method} {needs} --base, the checkpoint that the others were "
            "trained from; give it with task_arithmetic, ties, dare_linear, dare_ties, model_stock"
        )
    if recipe.method == Method.slerp and count != 2:
        raise UserError(f"--method slerp merges two checkpoints, not {count}; merge two at a time")
    if not 0 < recipe.density <= 1:
        raise UserError(f"--density is {recipe.density:g}; it must be above 0, and at most 1")
    if out.exists():
        raise UserError(f"--out {out} exists already; choose another folder")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {out} cannot be written: there is no folder {out.parent}")


def _is_used(folder: Path) -> Callable[[str], bool]:
    """Whether a model reads a tensor: a tied head is stored by some programs and read by none."""
    tied = read_text_config(folder).get("tie_word_embeddings")
    return lambda name: (
        not name.endswith(".rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
    )


def _check_alike(folders: Sequence[Path], stored: Sequence[StoredTensors]) -> None:
    """Raise `UserError` unless all checkpoints have one architecture and one tokenizer."""
    first = folders[0]
    model = facts_of(first)
    check_tokenizer(base_of(first), read_text_config(first)["vocab_size"])
    tokenizer = _tokenizer(first)
    for folder, tensors in zip(folders[1:], stored[1:], strict=True):
        other = facts_of(folder)
        for name in sorted((model.keys() | other.keys()) - LENGTHS):
            ours, theirs = model.get(name), other.get(name)
            if ours != theirs:
                raise UserError(
                    f"{folder} is a model of another architecture than {first}: "
                    f"{name.replace('_', ' ')} is {theirs!s:.80}, not {ours!s:.80}; only "
                    "checkpoints of one architecture can be merged"
                )
        _check_shapes(first, stored[0], folder, tensors)
        if _tokenizer(folder) != tokenizer:
            raise UserError(
                f"the tokenizers of {first} and {folder} differ, so a token id stands for another "
                "text in each; only checkpoints with one tokenizer can be merged"
            )


def _check_shapes(first: Path, ours: StoredTensors, folder: Path, theirs: StoredTensors) -> None:
    for name in sorted(ours.shapes.keys() | theirs.shapes.keys()):
        if (name in ours.shapes) != (name in theirs.shapes):
            has, lacks = (first, folder) if name in ours.shapes else (folder, first)
            raise UserError(
                f"{lacks} lacks {name}, which {has} has; only checkpoints of one architecture can "
                "be merged"
            )
        if ours.shapes[name] != theirs.shapes[name]:
            raise UserError(
                f"{name} has shape {list(theirs.shapes[name])} in {folder} and "
                f"{list(ours.shapes[name])} in {first}; only checkpoints of one architecture can "
                "be merged"
            )


def _tokenizer(folder: Path) -> Any:
    """What gives token ids their meaning; None without a tokenizer.json."""
    path = base_of(folder) / "tokenizer.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is no tokenizer file ({error})") from error
    return {name: value for name, value in found.items() if name not in _UNCOMPARED}


def _size(stored: StoredTensors, name: str) -> int:
    return prod(stored.shapes[name]) * _dtype(stored, name).itemsize


def _dtype(stored: StoredTensors, name: str) -> torch.dtype:
    dtype = stored.dtype_name(name)
    if dtype not in DTYPES:
        raise UserError(
            f"{name} is stored as {dtype}; checkpoints in {', '.join(DTYPES)} can be merged"
        )
    return DTYPES[dtype]


def _check_room(out: Path, total: int) -> None:
    free = shutil.disk_usage(out.absolute().parent).free
    if total > free:
        raise UserError(
            f"--out {out} needs {total / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there; "
            "choose another disk"
        )


def _merged(recipe: Recipe, stored: Sequence[StoredTensors], name: str) -> Tensor:
    """One tensor of the result, in the first checkpoint's dtype; raises `UserError`."""
    merged = recipe.apply([each.read(name).float() for each in stored])
    if not bool(torch.isfinite(merged).all()):
        raise UserError(
            f"{name} holds NaN or infinity after the merge; one of the checkpoints is broken: "
            "leave it out"
        )
    return merged.to(_dtype(stored[0], name)).contiguous()
