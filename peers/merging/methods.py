"""How tensors of several checkpoints become one. All arithmetic is in fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

PARALLEL = 0.9995
"""Cosine of the angle above which slerp is computed as a linear mean: its sine is too small to
divide by."""


def linear(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean."""
    total = sum(weights)
    merged = tensors[0] * (weights[0] / total)
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        merged.add_(tensor, alpha=weight / total)
    return merged


def slerp(first: Tensor, second: Tensor, weights: Sequence[float]) -> Tensor:
    """A point on the arc from `first` to `second`, each taken as one vector.

    The second's share of the weights is its share of the angle.
    """
    share = weights[1] / sum(weights)
    norms = float(first.norm()) * float(second.norm())
    cosine = float((first * second).sum()) / norms if norms > 0 else 1.0
    if abs(cosine) > PARALLEL:
        return linear([first, second], weights)
    angle = math.acos(cosine)
    along = math.sin((1 - share) * angle) / math.sin(angle)
    return (first * along).add_(second, alpha=math.sin(share * angle) / math.sin(angle))


def ties(
    base: Tensor,
    tensors: Sequence[Tensor],
    weights: Sequence[float],
    density: float,
    scale: float,
) -> Tensor:
    """Trim, elect sign and merge (Yadav et al. 2023, arXiv 2306.01708), within one tensor.

    Of each checkpoint's difference from `base` the share `density` with the largest magnitudes
    stays. At each position the sign with the larger weighted sum wins, and the differences of
    that sign are averaged. `scale` multiplies the result, which is added to `base`.
    """
    moved = [trim(tensor - base, density) for tensor in tensors]
    elected = torch.zeros_like(base)
    for delta, weight in zip(moved, weights, strict=True):
        elected.add_(delta, alpha=weight)
    elected.sign_()
    total, share = torch.zeros_like(base), torch.zeros_like(base)
    for delta, weight in zip(moved, weights, strict=True):
        agrees = ((delta.sign() == elected) & (delta != 0)).float()
        total.add_(delta.mul_(agrees), alpha=weight)
        share.add_(agrees, alpha=weight)
    return base + total.div_(share.clamp_(min=min(weights))).mul_(scale)


def trim(delta: Tensor, density: float) -> Tensor:
    """`delta` with zeros except for its largest values: a share `density`, rounded up."""
    kept = math.ceil(density * delta.numel())
    if kept >= delta.numel():
        return delta
    sizes = delta.abs()
    least = sizes.flatten().kthvalue(delta.numel() - kept + 1).values
    return delta.mul_(sizes >= least)
