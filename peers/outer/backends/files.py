"""Updates and states as tensors, in the children that average."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from swarm.errors import UserError


def read_update(path: str, elements: int) -> Tensor:
    """An update, fp32 [`elements`]; raises `UserError` for a file of another size."""
    return _read(Path(path), "<f4", elements)


def read_state(path: str, size_bytes: int) -> Tensor:
    """The bytes of a state's file, uint8 [`size_bytes`]."""
    return _read(Path(path), "u1", size_bytes)


def _read(path: Path, dtype: str, count: int) -> Tensor:
    values = np.fromfile(path, dtype)
    if len(values) != count:
        raise UserError(f"{path} has {len(values)} values, but this model has {count}")
    return torch.from_numpy(values)


def write(path: str, values: Tensor) -> None:
    """Write a tensor's bytes."""
    values.detach().contiguous().numpy().tofile(path)


def is_state(values: object, size_bytes: int) -> bool:
    """Whether another trainer's tensor can be the file of a state of this model."""
    return (
        isinstance(values, Tensor)
        and values.dtype == torch.uint8
        and tuple(values.shape) == (size_bytes,)
    )
