"""Bytes of tensors alive while code runs, real or fake: how activations are counted."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of all tensors that are made under it, for as long as each lives."""

    def __init__(self, known: Iterable[Tensor] = (), ignored_bytes: int = -1) -> None:
        """`known`: tensors whose memory does not count; tensors of `ignored_bytes` neither."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes alive."""
        self.peak = 0
        """Most bytes alive at once."""
        self._ignored = ignored_bytes
        self._seen: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        for tensor in known:
            self._seen[tensor.untyped_storage()] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            tensor = leaf.to_local() if isinstance(leaf, DTensor) else leaf
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen[storage] = None
        size = storage.nbytes()
        if size == self._ignored:
            return
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size
