"""The log-probabilities of a batch's completion tokens under a transformers model."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from peers.engines.architecture import Architecture, Unsupported, describe
from peers.engines.logits import adjust_logits
from peers.learning.masks import attention_arguments
from peers.learning.packing import Rows
from peers.learning.routing import Routing
from swarm.errors import UserError

LOGITS_MAX = {"cpu": 1 << 25, "cuda": 1 << 28}
"""Logits held at once, fp32 (128 MiB, 1 GiB), by device: the head takes more tokens in pieces.
Small pieces do not fill a GPU. In 16 bits the head's gradient, a sum over pieces, is rounded once
per piece."""


class Scorer(torch.nn.Module):
    """Computes a model's log-probabilities and entropies of the completion tokens of `Rows`.

    It is a module, so that sharding and compilation can wrap the whole pass. The head is applied at
    completion positions only.
    """

    def __init__(self, model: Any) -> None:
        """Raises `UserError` for a model whose logits or attention this would compute wrongly."""
        super().__init__()
        try:
            self._described = described = describe(model.config.to_dict())
        except Unsupported as problem:
            raise UserError(f"the model cannot be scored: {problem}") from problem
        if described.attention_cap is not None and model.config._attn_implementation == "sdpa":
            raise UserError("attention sdpa cannot cap scores as this model does; choose eager")
        self.logits_max: int | None = None
        """Logits held at once; None: `LOGITS_MAX` of the device."""
        self.routing = Routing(model)
        """Records or replays the model's experts."""
        self._windows = {layer.kind: layer.window for layer in described.layers}
        self.model = model

    def forward(
        self,
        rows: Rows,
        entropy: bool = True,
        entropy_gradient: bool = False,
        largest_logit: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) of the batch's tokens `rows.index`, fp32 [k] each.

        log_softmax(logits / temperature) in fp32, at the rows' temperature. The entropy, in nats,
        is 0 unless `entropy`; it has a gradient only with `entropy_gradient`. With `largest_logit`
        the second value is the largest logit instead, with its gradient.
        """
        arguments = attention_arguments(self.model.config._attn_implementation, rows, self._windows)
        hidden = self.model.base_model(
            input_ids=rows.tokens, use_cache=False, **arguments
        ).last_hidden_state
        hidden = hidden.flatten(0, 1)[rows.predictor]
        head = self.model.get_output_embeddings()
        size = max(1, (self.logits_max or LOGITS_MAX[hidden.device.type]) // head.weight.shape[0])
        how = _How(self._described, rows.temperature, entropy, entropy_gradient, largest_logit)
        score = functools.partial(_score, head.weight, how)
        if len(hidden) > size and torch.is_grad_enabled():
            # The backward pass keeps only hidden states, and computes the logits again.
            score = functools.partial(checkpoint, score, use_reentrant=False)
        parts = zip(torch.split(hidden, size), torch.split(rows.target, size), strict=True)
        pieces = [score(part, target) for part, target in parts]
        log_pi, entropies = (torch.cat(values) for values in zip(*pieces, strict=True))
        return log_pi[rows.source], entropies[rows.source]


@dataclass(frozen=True)
class _How:
    """What a score is computed of, besides hidden states and the head."""

    model: Architecture
    temperature: float
    entropy: bool
    entropy_gradient: bool
    largest_logit: bool


def _score(head: Tensor, how: _How, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities of `target`, entropies), fp32 [m] each, from hidden states [m, hidden]."""
    if hidden.dtype == torch.float32:
        logits = F.linear(hidden, head)
    else:
        logits = _HalfHead.apply(hidden, head)  # type: ignore[no-untyped-call]
    logits = adjust_logits(how.model, logits)
    if how.temperature != 1:
        logits = logits / how.temperature
    log_all = torch.log_softmax(logits, dim=-1)
    log_pi = log_all.gather(-1, target[:, None])[:, 0]
    if how.largest_logit:
        return log_pi, logits.amax(dim=-1)
    if not how.entropy:
        return log_pi, torch.zeros_like(log_pi)
    with torch.set_grad_enabled(how.entropy_gradient and torch.is_grad_enabled()):
        return log_pi, -(log_all.exp() * log_all).sum(-1)


class _HalfHead(torch.autograd.Function):
    """fp32 logits of a head and hidden states in 16 bits; the backward pass computes in 16 bits.

    Products of two 16-bit numbers are exact in fp32 and their sums stay in fp32, as in the engine.
    """

    @staticmethod
    def forward(context: Any, hidden: Tensor, head: Tensor) -> Tensor:
        context.save_for_backward(hidden, head)
        if hidden.is_cuda:
            return torch.mm(hidden, head.t(), out_dtype=torch.float32)
        return F.linear(hidden.float(), head.float())

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        hidden, head = context.saved_tensors
        gradient = gradients[0].to(hidden.dtype)
        return gradient @ head, gradient.t() @ hidden
