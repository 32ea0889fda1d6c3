"""Weights kept in host memory, page-locked where a GPU copies from it."""

import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]
"""This rank's part of each of a policy's parameters, by name."""

PAGE_BYTES = 4096
"""A page of memory, or a multiple of it."""

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
                # Converted where it comes from: a copy that converts is not asynchronous.
                value.copy_(weights[name].to(self._dtype), non_blocking=True)
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
        buffer = host_tensor(end, self._dtype, self._device)
        return {
            name: buffer[starts[name] :][: shape.numel()].view(shape)
            for name, shape in self._shapes.items()
        }


def host_tensor(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Flat memory of the host, not initialised, page-locked if `device` is a GPU.

    torch's own pinned memory rounds each tensor up to a power of two, which may double it. The
    tensor's pages are its own, since a page can be locked only once."""
    size = elements * dtype.itemsize
    raw = torch.empty(size + 2 * PAGE_BYTES, dtype=torch.uint8)
    start = -raw.data_ptr() % PAGE_BYTES
    if device.type == "cuda" and size:
        _lock(raw, raw.data_ptr() + start, -(-size // PAGE_BYTES) * PAGE_BYTES)
    return raw[start : start + size].view(dtype)


def _lock(raw: Tensor, pointer: int, size: int) -> None:
    """Lock pages for as long as `raw` lives; if the system refuses, copies are slower."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(pointer, size, 0)) == 0:
        weakref.finalize(raw.untyped_storage(), runtime.cudaHostUnregister, pointer)
        return
    with suppress(RuntimeError):  # CUDA would report the refusal with the next kernel
        torch.zeros(1, device="cuda")
