"""An optimiser step of a trained policy, and its figures."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from peers.learning.optimisers import clip_gradients
from peers.learning.policy import TrainedPolicy


def descend(
    policy: TrainedPolicy, sums: Mapping[str, Tensor], norm_max: float, rate: float
) -> dict[str, float]:
    """Take an optimiser step along a policy's gradients; skip it if loss or gradient is not finite.

    `sums`: this rank's parts of the step's figures, `loss` among them, which stay on the device
    until here: reading one in a pass would make the device wait for the host. Returns their sums
    over the ranks, and figures of the step."""
    ranks, names = policy.ranks, sorted(sums)
    on_device = clip_gradients(policy.trained().values(), norm_max)
    on_device = torch.stack([*(sums[name] for name in names), on_device.to(ranks.device)])
    *mine, norm = on_device.tolist()
    figures = dict(zip(names, ranks.sum(mine), strict=True))
    finite = math.isfinite(norm) and math.isfinite(figures["loss"])
    if finite:
        for group in policy.optimiser.param_groups:
            group["lr"] = rate
        policy.optimiser.step()
    return {**figures, "gradient_norm": norm, "learning_rate": rate, "skipped": float(not finite)}
