"""A layer's MLP: a dense gated one, or a mixture of experts."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
from torch import Tensor

from peers.engines.architecture import Experts
from peers.engines.projection import Projection


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
