"""What families do to logits after the head, for the engine and for the trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from peers.engines.architecture import Architecture


def adjust_logits(model: Architecture, logits: Tensor) -> Tensor:
    """Scale and cap the head's logits as the model does."""
    if model.logits_divisor != 1:
        logits = logits / model.logits_divisor
    cap = model.logits_cap
    return logits if cap is None else torch.tanh(logits / cap) * cap
