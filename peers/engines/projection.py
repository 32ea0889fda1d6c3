"""The matrix products of a layer, with unmerged adapters beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
from torch import Tensor

from peers.engines.adapter import Adapter


@dataclass
class Projection:
    """A product with one matrix, or with several of the model's stacked into one."""

    weight: Tensor
    """[outputs, inputs]"""
    bias: Tensor | None = None
    modules: tuple[tuple[str, int], ...] = ()
    """Names of the stacked matrices in the model, each with its number of outputs."""
    low: tuple[Tensor, Tensor] | None = None
    """A [r, inputs] and scale · B [outputs, r] of the unmerged adapters."""

    def __call__(self, values: Tensor) -> Tensor:
        result = F.linear(values, self.weight, self.bias)
        if self.low is None:
            return result
        a, b = self.low
        return result + F.linear(F.linear(values, a), b)

    def adapt(self, adapter: Adapter | None) -> None:
        """Put an adapter beside the matrix instead of the one before; None: no adapter.

        The adapters of stacked matrices make one pair: A stacked, B on the blocks of a diagonal.
        """
        self.low = None
        pairs = [adapter.pairs.get(name) if adapter else None for name, _ in self.modules]
        found = [pair for pair in pairs if pair is not None]
        if adapter is None or not found:
            return
        a = torch.cat([pair[0] for pair in found]).to(self.weight)
        b = self.weight.new_zeros(len(self.weight), len(a))
        row = column = 0
        for pair, (_, rows) in zip(pairs, self.modules, strict=True):
            if pair is not None:
                width = pair[1].shape[1]
                scaled = adapter.config.scale * pair[1].float()
                b[row : row + rows, column : column + width] = scaled.to(self.weight)
                column += width
            row += rows
        self.low = a, b
