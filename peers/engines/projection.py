"""The matrix products of a layer, with unmerged adapters beside them, and its MLP made of them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
from torch import Tensor

from peers.engines.adapter import Adapter
from peers.engines.architecture import Experts

ROWS = 8
"""Rows that the layout of a packed matrix is chosen for."""


def widens(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `packed` keeps matrices in fp32: where a CPU has no products in bf16, those take six
    times as long as in fp32, in which products of bf16 numbers are exact, too."""
    narrow = dtype == torch.bfloat16 and device.type == "cpu" and torch._C._has_mkldnn
    return narrow and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def packed(weight: Tensor) -> Tensor:
    """The same matrix [out, in], on a CPU in oneDNN's layout for products with few rows.

    Products with two to 64 rows and one thread are 1.3 to 1.7 times as fast, in fp32 (MKL) as in
    bf16, where each would lay it out anew. Only `linear` multiplies with it."""
    if widens(weight.dtype, weight.device):
        weight = weight.float()
    takes = weight.dtype in (torch.float32, torch.bfloat16)
    if weight.device.type != "cpu" or not torch._C._has_mkldnn or not takes:
        return weight
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
    return found


def linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, also with a packed matrix; its result has the dtype of `values`."""
    if not weight.is_mkldnn:
        return F.linear(values, weight, bias)
    given = values.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(*given, "none", [], "")
    return found.to(values.dtype)


@dataclass
class Projection:
    """A product with one matrix, or with several of the model's stacked into one."""

    weight: Tensor
    """[outputs, inputs], plain or `packed`."""
    bias: Tensor | None = None
    modules: tuple[tuple[str, int], ...] = ()
    """Names of the stacked matrices in the model, each with its number of outputs."""
    low: tuple[Tensor, Tensor] | None = None
    """A [r, inputs] and scale · B [outputs, r] of the unmerged adapters."""

    def __call__(self, values: Tensor) -> Tensor:
        result = linear(values, self.weight, self.bias)
        if self.low is None:
            return result
        a, b = self.low
        return result + F.linear(F.linear(values.to(a.dtype), a), b).to(result.dtype)

    def adapt(self, adapter: Adapter | None) -> None:
        """Put an adapter beside the matrix instead of the one before; None: no adapter.

        The adapters of stacked matrices make one pair: A stacked, B on the blocks of a diagonal."""
        self.low = None
        pairs = [adapter.pairs.get(name) if adapter else None for name, _ in self.modules]
        found = [pair for pair in pairs if pair is not None]
        if adapter is None or not found:
            return
        a = torch.cat([pair[0] for pair in found]).to(self.weight.device, self.weight.dtype)
        b = a.new_zeros(self.weight.shape[0], len(a))
        row = column = 0
        for pair, (_, rows) in zip(pairs, self.modules, strict=True):
            if pair is not None:
                width = pair[1].shape[1]
                scaled = adapter.config.scale * pair[1].float()
                b[row : row + rows, column : column + width] = scaled.to(b)
                column += width
            row += rows
        self.low = a, b


@dataclass
class Dense:
    """down(silu(gate(x)) · up(x)); gate and up come from one matrix product."""

    gate_up: Projection
    down: Projection

    def __call__(self, inner: Tensor) -> Tensor:
        gate, up = self.gate_up(inner).chunk(2, -1)
        return self.down(F.silu(gate) * up)


@dataclass
class Mixture:
    """The sum of each token's chosen experts, weighted by the router."""

    how: Experts
    router: Tensor
    """[experts, hidden]"""
    gate_up: Tensor
    """[experts, 2 · inner, hidden]"""
    down: Tensor
    """[experts, hidden, inner]"""

    def __call__(self, inner: Tensor) -> Tensor:
        flat = inner.flatten(0, -2)
        weights, chosen = self._route(flat)
        total = torch.zeros_like(flat)
        # Tokens sorted by expert: each expert computes its tokens in one product.
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.how.count).tolist()
        for expert, some in enumerate(torch.split(order, counts)):
            if not len(some):
                continue
            tokens = some // self.how.chosen
            gate_up, down = Projection(self.gate_up[expert]), Projection(self.down[expert])
            result = Dense(gate_up, down)(flat[tokens]) * weights.flatten()[some, None]
            total.index_add_(0, tokens, result)
        return total.view(inner.shape)

    def _route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, indices) of each token's experts, [tokens, chosen] each."""
        scores = torch.softmax(F.linear(flat, self.router), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(scores, self.how.chosen, dim=-1)
        if self.how.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(flat.dtype), chosen
