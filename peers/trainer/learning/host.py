"""Weights kept in host memory, page-locked where a GPU copies from it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]
"""This rank's part of each of a policy's parameters, by name."""

ALIGNMENT_BYTES = 64
"""Every tensor in a buffer begins at a multiple of this: a cache line."""


class HostMemory:
    """Copies of weights, all in one dtype; the memory of dropped copies is used again."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, like: Mapping[str, Tensor]
    ) -> None:
        """`device`: where the weights come from and return to. `like`: their names and shapes."""
        self._device = device
        self._dtype = dtype
        self._shapes = {name: value.shape for name, value in like.items()}
        self._free: list[Weights] = []

    def copy(self, weights: Mapping[str, Tensor]) -> Weights:
        """Copy weights to host memory, one tensor after the other."""
        kept = self._free.pop() if self._free else self._allocate()
        with torch.no_grad():
            for name, value in kept.items():
                value.copy_(weights[name], non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return kept

    def reuse(self, weights: Weights) -> None:
        """Take back a copy that `copy` made; the next copy overwrites it."""
        self._free.append(weights)

    def _allocate(self) -> Weights:
        step = ALIGNMENT_BYTES // self._dtype.itemsize
        starts, end = {}, 0
        for name, shape in self._shapes.items():
            starts[name] = end
            end += -(-shape.numel() // step) * step
        buffer = torch.empty(end, dtype=self._dtype)
        if self._device.type == "cuda":
            page_lock(buffer)
        return {
            name: buffer[starts[name] :][: shape.numel()].view(shape)
            for name, shape in self._shapes.items()
        }


def page_lock(buffer: Tensor) -> None:
    """Lock a buffer in host memory, so that a GPU copies it without a stop.

    torch's own pinned memory rounds each tensor up to a power of two, which may double it. If the
    system refuses the lock, copies are slower and nothing else changes.
    """
    pointer = buffer.data_ptr()
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(pointer, buffer.nbytes, 0)) == 0:
        weakref.finalize(buffer.untyped_storage(), _unlock, pointer)


def _unlock(pointer: int) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(pointer)
