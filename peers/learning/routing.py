"""Router replay: a mixture's experts, recorded in one pass and used again in another.

The trainer computes log μ with the policy that generated a rollout. Where the run asks for it, that
pass also records which experts each layer chose for each token, and the training pass uses the same
experts. Their weights in the sum are the trained router's own, over the recorded experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from peers.engines.architecture import is_described
from swarm.errors import UserError

NOT_RECORDED = -1
"""In the place of an expert: the router chooses."""


class Routing:
    """Records or replays the experts that a model's routers choose."""

    def __init__(self, model: Any) -> None:
        self._chosen: list[Tensor] | None = None
        """The experts that each layer chose in the pass that is recorded."""
        self._replayed: Tensor | None = None
        self.layers = 0
        """Layers with a router."""
        known = is_described(model.config.to_dict())  # other families weigh experts otherwise
        for name, module in model.named_modules() if known else ():
            if name.endswith(".mlp.gate") and hasattr(module, "top_k"):
                module.register_forward_hook(self._hook(self.layers))
                self.layers += 1

    def check(self, compiled: bool) -> None:
        """Raise `UserError` if the model has no experts to choose, or runs compiled."""
        if not self.layers:
            raise UserError(
                "objective.router_replay is true, but the model is no mixture of experts whose "
                "choice can be replayed; remove it"
            )
        if compiled:
            raise UserError(
                "trainer.compile cannot be used in a run with objective.router_replay; omit it"
            )

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Yield a list that holds, after a forward pass, the experts [tokens, k] of each layer."""
        self._chosen = []
        try:
            yield self._chosen
        finally:
            self._chosen = None

    @contextmanager
    def replaying(self, experts: Tensor | None, device: torch.device) -> Iterator[None]:
        """Use these experts in a pass, forward and backward, which may compute a layer again.

        `experts`: int [tokens, layers, k], `NOT_RECORDED` for a token whose experts the router
        chooses. None: it chooses all.
        """
        self._replayed = None if experts is None else experts.to(device, non_blocking=True)
        try:
            yield
        finally:
            self._replayed = None

    def _hook(self, layer: int) -> Any:
        def choose(gate: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            logits, weights, chosen = output
            if self._chosen is not None:
                self._chosen.append(chosen)
            if self._replayed is None:
                return None
            experts = self._replayed[:, layer]
            experts = torch.where(experts == NOT_RECORDED, chosen, experts)
            found = torch.softmax(logits, dtype=torch.float32, dim=-1).gather(-1, experts)
            if gate.norm_topk_prob:
                found = found / found.sum(dim=-1, keepdim=True)
            return logits, found.to(weights.dtype), experts

        return choose
