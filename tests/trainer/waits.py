"""Finds operations for which the host would wait for a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Waits(TorchDispatchMode):
    """Counts the operations for which the host waits for the device, by their name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        masked = name in ("aten.index", "aten.index_put", "aten.index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        waits = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.masked_select")
        if masked or name in waits or (name == "aten.repeat_interleave" and len(args) == 1):
            self.found.append(name)
        return func(*args, **(kwargs or {}))
