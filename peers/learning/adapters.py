"""LoRA in training: thin matrices beside a model's frozen ones (`swarm.wire.manifest.Adapter`).

Only the thin matrices are trained, saved, held as past policies and published. peft is not used:
its wrappers rename every parameter and know neither the device `meta` nor sharding. Its file format
is kept (`peers.engines.adapter`)."""

import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3
import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
from torch import Tensor

from peers.engines.adapter import read_matrices, stored_name, target_names, write_adapter
from peers.engines.adapter_config import is_adapter, read_adapter_config
from peers.engines.model import INDEX_FILE, weight_files
from peers.engines.tokenizer import copy_tokenizer
from peers.learning.host import Weights
from peers.learning.stored import slices_of
from swarm.errors import UserError
from swarm.wire.manifest import Adapter

MATRICES = {"lora_a": "A", "lora_b": "B"}
"""A module's thin matrices, by the ends of their parameters' names."""


class AdaptedLinear(torch.nn.Module):
    """A linear layer with the parameters of a plain one, and an adapter."""

    def __init__(self, plain: torch.nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        empty = functools.partial(plain.weight.new_empty, dtype=torch.float32)
        self.lora_a = torch.nn.Parameter(empty((rank, plain.in_features)))
        self.lora_b = torch.nn.Parameter(empty((plain.out_features, rank)))
        self.scale = scale

    def forward(self, values: Tensor) -> Tensor:
        low = F.linear(F.linear(values, self.lora_a), self.lora_b)
        return F.linear(values, self.weight, self.bias) + self.scale * low


def adapt(model: Any, adapter: Adapter) -> None:
    """Freeze a blank model, with adapters without values beside its targets; raises `UserError`."""
    model.requires_grad_(False)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    names = target_names(frozenset(adapter.names), shapes)
    for target in adapter.names:
        if not any(name.endswith(f".{target}") for name in names):
            raise UserError(
                f"adapter.targets names {target}, which no layer of this model "
                f"({model.config.model_type}) has as a matrix of its own; leave it out of "
                "[adapter] in the run's TOML file"
            )
    for name in names:
        parent, _, own = name.rpartition(".")
        plain = model.get_submodule(name)
        setattr(model.get_submodule(parent), own, AdaptedLinear(plain, adapter.rank, adapter.scale))


def read_adapter(
    folder: Path, parameters: Mapping[str, Tensor], adapter: Adapter, seed: int
) -> Weights:
    """This rank's part of a policy's matrices, a whole model's being new; raises `UserError`."""
    if not is_adapter(folder):
        return {
            name: initial(name, torch.Size(value.shape), seed)[slices_of(value)]
            for name, value in parameters.items()
        }
    config = read_adapter_config(folder)
    for name, ours, theirs in (
        ("rank", adapter.rank, config.rank),
        ("alpha / rank", adapter.scale, config.scale),
        ("targets", sorted(adapter.names), sorted(config.targets)),
    ):
        if ours != theirs:
            raise UserError(
                f"{folder} holds an adapter of another run: its {name} is {theirs}, not {ours}"
            )
    wanted = {_stored(name): tuple(value.shape) for name, value in parameters.items()}
    found = read_matrices(folder, wanted)
    return {name: found[_stored(name)][slices_of(value)] for name, value in parameters.items()}


def initial(name: str, shape: torch.Size, seed: int) -> Tensor:
    """A matrix as peft begins: A uniform, B zero, so nothing changes; the same on every rank."""
    if name.endswith(".lora_b"):
        return torch.zeros(shape)
    drawn = blake3.blake3(f"{seed}/{name}".encode()).digest(length=8)
    generator = torch.Generator().manual_seed(int.from_bytes(drawn, "little") >> 1)
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def write(folder: Path, matrices: Weights, adapter: Adapter, base: Path) -> None:
    """Write a policy's adapter to a folder, with the base's config and tokenizer."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, value in matrices.items():
        module, _, matrix = name.rpartition(".")
        pairs.setdefault(module, {})[MATRICES[matrix]] = value
    both = {module: (pair["A"], pair["B"]) for module, pair in pairs.items()}
    write_adapter(folder, both, adapter.rank, adapter.alpha, base.name)
    shutil.copyfile(base / "config.json", folder / "config.json")
    copy_tokenizer(base, folder)


def write_base(folder: Path, base: Path) -> None:
    """Write policy 0, the base of all adapters: a copy of the model's own files."""
    index = base / INDEX_FILE
    for path in [*weight_files(base), base / "config.json", *([index] if index.exists() else [])]:
        shutil.copyfile(path, folder / path.name)
    copy_tokenizer(base, folder)


def _stored(name: str) -> str:
    """A parameter's name in the file."""
    module, _, matrix = name.rpartition(".")
    return stored_name(module, MATRICES[matrix])
