"""The head of a transformers model alone: hidden states that were computed before become logits.

The model's own forward pass runs with a stand-in for its body, so that whatever a family does after
its head (scales, caps, biases) is done as in transformers.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from peers.engines.loading import body_of
from swarm.errors import UserError


class Head:
    """Computes a model's logits, with the weights that its head has at the time of the call."""

    def __init__(self, model: Any, change: Callable[[nn.Module], nn.Module] | None = None) -> None:
        """`change` makes the head's module, which computes the product, from the model's own.

        Raises `AttributeError` for a model whose body or head cannot be told apart.
        """
        self._given = _Given(body_of(model))
        self._model: Any = copy.copy(model)
        self._model._modules = dict(model._modules)
        self._model._modules[model.base_model_prefix] = self._given
        output = model.get_output_embeddings()
        for name, module in model._modules.items():
            if module is output and module is not None and change is not None:
                self._model._modules[name] = change(module)

    def __call__(self, states: Tensor) -> Tensor:
        """Hidden states [n, hidden] → logits, fp32 [n, vocabulary].

        Raises `UserError` for a model that computes logits of other states than its body's.
        """
        self._given.states = states[None]
        blank = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
        found: Tensor = self._model(input_ids=blank, use_cache=False).logits[0].float()
        if self._given.states is not None:
            raise UserError(
                f"models of the family {self._model.config.model_type} compute logits of other "
                "states than their body's, so they can be neither checked nor trained here"
            )
        return found


class _Output:
    """What a body returns: its states, and None for all else that a family may look for."""

    def __init__(self, states: Tensor | None) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands in for a model's body and returns hidden states that were computed before."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self._body = (body,)
        """In a tuple, so that it is no part of this module."""
        self.states: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """What the model reads of its body: multipliers of its head, for example."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._body[0], name)

    def forward(self, *_arguments: Any, **_named: Any) -> Any:
        given, self.states = self.states, None
        return _Output(given)
