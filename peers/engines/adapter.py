"""LoRA adapters of a model: two thin matrices per target, in the file format of peft.

A policy's folder may hold an adapter instead of weights: `adapter_config.json` and
`adapter_model.safetensors`, beside the model's own `config.json` and tokenizer. Its base is another
folder. A target's weight W counts as W + alpha / rank · B · A (Hu et al. 2021, 2106.09685).

An adapter comes from the network: its file's header is checked before any tensor is read."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from peers.engines.adapter_config import CONFIG_FILE, AdapterConfig, read_adapter_config
from peers.engines.stored import save_tensors
from swarm.errors import UserError
from swarm.wire.manifest import ADAPTER_TARGETS

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"

HEADER_BYTES_MAX = 16 << 20
"""Largest header of the weights' file: 200 bytes for each of 80,000 tensors."""

DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
"""Dtypes of an adapter, as safetensors names them, and their bytes."""

PREFIX = "base_model.model."
"""What peft puts before every name."""

_TARGET = re.compile(rf"model\.layers\.\d+\.(?:self_attn|mlp)\.({'|'.join(ADAPTER_TARGETS)})")


def target_names(targets: frozenset[str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The modules that are adapted, of a model whose weights have these names and shapes."""
    found = []
    for name, shape in shapes.items():
        match = _TARGET.fullmatch(name.removesuffix(".weight"))
        if match is not None and match[1] in targets and len(shape) == 2:
            found.append(name.removesuffix(".weight"))
    return sorted(found)


def stored_name(module: str, matrix: str) -> str:
    """The name in the file of a module's matrix `A` or `B`."""
    return f"{PREFIX}{module}.lora_{matrix}.weight"


class Adapter:
    """An adapter's matrices, on the CPU, by the names of the modules that they adapt."""

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Read an adapter; raises `UserError` unless it fits a base of these names and shapes."""
        self.config = config = read_adapter_config(folder)
        tensors = read_matrices(folder, expected_shapes(config, shapes, folder))
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {
            module: (tensors[stored_name(module, "A")], tensors[stored_name(module, "B")])
            for module in target_names(config.targets, shapes)
        }

    def merged(self, name: str, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The weight of that name with its adapter: summed in fp32, then in `dtype`.

        None stands for the weight's own, whose rounding may be as large as what was learned."""
        pair = self.pairs.get(name.removesuffix(".weight"))
        if pair is None or not name.endswith(".weight"):
            return weight
        a, b = pair
        total = torch.addmm(weight.float(), b.float(), a.float(), alpha=self.config.scale)
        return total.to(dtype or weight.dtype)


def expected_shapes(
    config: AdapterConfig, shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> dict[str, tuple[int, ...]]:
    """An adapter's matrices' shapes by name; raises `UserError` if the base lacks a target."""
    names = target_names(config.targets, shapes)
    for target in sorted(config.targets):
        if not any(name.endswith(f".{target}") for name in names):
            raise UserError(
                f"{folder} adapts {target}, which no layer of its base has as a matrix of its own; "
                "leave it out of the adapter's targets"
            )
    wanted: dict[str, tuple[int, ...]] = {}
    for name in names:
        rows, columns = shapes[f"{name}.weight"]
        wanted[stored_name(name, "A")] = (config.rank, columns)
        wanted[stored_name(name, "B")] = (rows, config.rank)
    return wanted


def read_matrices(folder: Path, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Read just these tensors, on the CPU, once the header is found right; raises `UserError`."""
    path = folder / WEIGHTS_FILE
    if not path.exists() and (folder / PICKLED_FILE).exists():
        raise UserError(
            f"{folder} holds a pickled adapter ({PICKLED_FILE}), which is refused because it can "
            "run code; save it as safetensors"
        )
    _check_size(path, wanted)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            names = set(file.keys())
            _check_names(path, names, wanted)
            for name, shape in wanted.items():
                part = file.get_slice(name)
                if tuple(part.get_shape()) != shape or part.get_dtype() not in DTYPES:
                    raise UserError(
                        f"{path}: {name} is {part.get_dtype()} {part.get_shape()}, not "
                        f"{list(shape)} in F32, F16 or BF16; the adapter is of another base or rank"
                    )
            found = {name: file.get_tensor(name) for name in wanted}
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{path} is no safetensors file ({error})") from error
    for name, tensor in found.items():
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{path}: {name} holds NaN or infinity; the adapter is broken")
    return found


def _check_size(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    values = sum(torch.Size(shape).numel() for shape in wanted.values())
    most = values * max(DTYPES.values()) + HEADER_BYTES_MAX
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    if size > most:
        raise UserError(
            f"{path} has {size} bytes; an adapter of this rank for this base has at most {most}"
        )


def _check_names(path: Path, names: set[str], wanted: Mapping[str, tuple[int, ...]]) -> None:
    missing, more = sorted(wanted.keys() - names), sorted(names - wanted.keys())
    if missing:
        raise UserError(f"{path} lacks {missing[0]}; the adapter is of another base")
    if more:
        raise UserError(
            f"{path} holds {more[0]!r:.200}, which its adapter_config.json does not name; the "
            "adapter is of another base"
        )


def write_adapter(
    folder: Path, pairs: Mapping[str, tuple[Tensor, Tensor]], rank: int, alpha: float, base: str
) -> None:
    """Write an adapter's two files into a folder; `base` is the name of its base, for people."""
    targets = {module.rpartition(".")[2] for module in pairs}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(targets),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1))
    tensors = {}
    for module, (a, b) in pairs.items():
        tensors[stored_name(module, "A")] = a.contiguous()
        tensors[stored_name(module, "B")] = b.contiguous()
    save_tensors(tensors, folder / WEIGHTS_FILE)
