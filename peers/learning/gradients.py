"""Gradients of parameters that are divided over different sets of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from peers.learning.sharding import local, whole


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by the ranks that they are divided over: torch's fused operations take tensors
    of one mesh only."""
    found: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        found.setdefault(mesh, []).append(tensor)
    return list(found.values())


def clip_gradients(parameters: Iterable[Tensor], norm_max: float) -> Tensor:
    """Scale the gradients down to a norm of at most `norm_max`, as torch's `clip_grad_norm_`;
    return the norm before."""
    parameters = list(parameters)
    groups = by_mesh([each.grad for each in parameters if each.grad is not None])
    if len(groups) < 2:
        return whole(torch.nn.utils.clip_grad_norm_(parameters, norm_max))
    norms = [whole(torch.nn.utils.get_total_norm(group)) for group in groups]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    scale = (norm_max / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([local(each) for group in groups for each in group], scale)
    return norm
