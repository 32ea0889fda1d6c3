"""A model folder's weights, of which each rank reads only its own part."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from peers.engines.experts import fused_names
from peers.engines.loading import load_policy
from peers.engines.model import open_weights
from swarm.errors import UserError

Slices = tuple[slice, ...]


class StoredWeights:
    """Tensors of a Hugging Face folder, mapped, in files that stay open though it is deleted."""

    def __init__(self, folder: Path) -> None:
        """Read the files' headers; raises `UserError`."""
        self.folder = folder
        self.bytes_read = 0
        """Bytes of all parts read so far."""
        self._files, self.shapes = open_weights(folder)
        self._fused = fused_names(self.shapes)
        for name, experts in self._fused.items():
            rows, *others = self.shapes[experts[0][0]]
            self.shapes[name] = (len(experts), len(experts[0]) * rows, *others)
            for part in (part for parts in experts for part in parts):
                del self.shapes[part]

    def part(self, name: str, slices: Slices) -> Tensor:
        """A part of a tensor, its experts read whole, on the CPU, as stored; raises `UserError`."""
        if name not in self._fused:
            return self._read(name, slices)
        experts = [
            torch.cat([self._read(part, (slice(None),)) for part in parts])
            for parts in self._fused[name][slices[0]]
        ]
        none = torch.empty(0, *self.shapes[name][1:], dtype=self.dtype())
        return (torch.stack(experts) if experts else none)[(slice(None), *slices[1:])]

    def _read(self, name: str, slices: Slices) -> Tensor:
        try:
            part: Tensor = self._files[name].get_slice(name)[slices]
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"{self.folder}: {name} cannot be read ({error})") from error
        self.bytes_read += part.nbytes
        return part

    def dtype(self) -> torch.dtype:
        """The dtype of the first tensor in floating point; fp32 if there is none."""
        for name in self._files:
            shape = self._files[name].get_slice(name).get_shape()
            first: Tensor = self._files[name].get_slice(name)[tuple(slice(0, 1) for _ in shape)]
            found = first.dtype
            if found.is_floating_point:
                return found
        return torch.float32


class ConvertedWeights(StoredWeights):
    """Weights that transformers renames, divides or joins: read whole by it, and held in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_read = 0
        model = load_policy(folder)
        self._weights: dict[str, Tensor] = {
            name: value.detach() for name, value in model.named_parameters()
        }
        self.shapes = {name: tuple(value.shape) for name, value in self._weights.items()}

    def part(self, name: str, slices: Slices) -> Tensor:
        part: Tensor = self._weights[name][slices]
        self.bytes_read += part.nbytes
        return part

    def dtype(self) -> torch.dtype:
        return next(iter(self._weights.values())).dtype


def open_stored(folder: Path, model: Any) -> StoredWeights:
    """The weights in a folder by the names of the model's parameters; raises `UserError`."""
    stored = StoredWeights(folder)
    names = (
        name for name, _ in model.named_parameters() if not name.endswith((".lora_a", ".lora_b"))
    )
    return stored if all(name in stored.shapes for name in names) else ConvertedWeights(folder)


class StoredPart(Mapping[str, Tensor]):
    """This rank's part of each of a policy's parameters, read from a folder at each access."""

    def __init__(
        self, stored: StoredWeights, parameters: Mapping[str, Tensor], dtype: torch.dtype
    ) -> None:
        """`parameters`: the policy's, whose names and layout say what is read."""
        self._stored = stored
        self._dtype = dtype
        self._slices = {name: slices_of(parameter) for name, parameter in parameters.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._stored.part(name, self._slices[name]).to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)


def slices_of(parameter: Tensor) -> Slices:
    """The indices, in the whole parameter, of the part that this rank holds."""
    shape, start = tuple(parameter.shape), (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        shape, start = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    return tuple(slice(low, low + size) for low, size in zip(start, shape, strict=True))
