"""GRPO with two-sided clipping, averaged over tokens: the INTELLECT-2 objective (2505.07291).

Every tensor is flat, one entry per completion token of the batch, so neither padding nor packing
is seen here. All sums are divided by `token_count`, the tokens of the *whole* batch: parts of a
batch (micro-batches, later ranks) give losses, gradients and metrics that simply add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm.errors import UserError
from swarm.messages import Objective

LOG_RATIO_MAX = 20.0
"""Log-ratios are clamped to ± this before exp: beyond it the clipping has decided already."""

KL_LOG_RATIO_MAX = 10.0
"""Upper bound on d in the KL estimator, whose e^d would otherwise swamp the batch by one token.
There is no lower one: as π outgrows π_ref the gradient tends to 1 and must keep pulling back."""

STD_EPSILON = 1e-6
"""Added to the standard deviation of a group's rewards."""


def check(objective: Objective) -> None:
    """Raises `UserError` when the two bounds on the ratio contradict each other."""
    if not 0 < objective.epsilon < 1 or not objective.delta > 1 + objective.epsilon:
        raise UserError(
            f"objective.delta is {objective.delta:g} and objective.epsilon {objective.epsilon:g}; "
            "epsilon must lie in (0, 1) and delta above 1 + epsilon"
        )


def advantages(rewards: Tensor, normalise_by_std: bool) -> Tensor:
    """Rewards [..., G] of groups → advantages [..., G]: r − mean, over (std + 1e-6) if asked.

    Without the division it is Dr. GRPO. The standard deviation is the population's (over G).
    """
    centred = rewards - rewards.mean(-1, keepdim=True)
    if not normalise_by_std:
        return centred
    return centred / (rewards.std(-1, correction=0, keepdim=True) + STD_EPSILON)


def grpo(
    objective: Objective,
    log_pi: Tensor,
    log_old: Tensor,
    advantage: Tensor,
    entropy: Tensor,
    token_count: int,
    log_generation: Tensor,
    log_reference: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss (to be minimised) and its metrics, for n tokens, fp32 [n] each.

    `log_pi`: the learner's log-probabilities, with gradient. `log_old`: the ratio's denominator.
    `advantage`: of the token's completion. `entropy`: of the learner's distribution, in nats.
    `log_generation`: log μ of the policy that generated; metrics only. `log_reference`: needed
    when the KL coefficient is not 0. Metrics are detached scalars, each a sum over these tokens
    divided by `token_count`.
    """
    low, high = 1 - objective.epsilon, 1 + objective.epsilon
    ratio = (log_pi - log_old).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    # δ bounds the loss where A < 0: there min(r·A, clip(r)·A) alone grows with r without limit.
    raw = ratio.clamp(max=objective.delta) * advantage
    clipped = ratio.clamp(low, high) * advantage
    per_token = -torch.minimum(raw, clipped)

    with torch.no_grad():
        sums = {
            "loss_policy": per_token.sum(),
            "ratio": ratio.sum(),
            "clipped_low": ((ratio < low) & (advantage < 0)).sum(),
            "clipped_high": ((ratio > high) & (advantage > 0)).sum(),
            "clipped_delta": ((ratio > objective.delta) & (advantage < 0)).sum(),
            "kl_generation": _k3(log_generation, log_pi).sum(),
            "entropy": entropy.sum(),
        }
    if objective.kl_coefficient:
        if log_reference is None:
            raise ValueError("kl_coefficient is not 0 but there are no reference log-probabilities")
        kl = _k3(log_reference, log_pi)
        per_token = per_token + objective.kl_coefficient * kl
        sums["kl_reference"] = kl.detach().sum()
    if objective.entropy_coefficient:
        per_token = per_token - objective.entropy_coefficient * entropy
    loss = per_token.sum() / token_count
    metrics = {name: value.detach() / token_count for name, value in sums.items()}
    return loss, {"loss": loss.detach(), **metrics}


def _k3(log_other: Tensor, log_pi: Tensor) -> Tensor:
    """e^d − d − 1 with d = log other − log π: KL(π ‖ other) per token, never negative.

    Unbiased on tokens drawn from π (Schulman, "Approximating KL divergence", 2020).
    """
    d = (log_other - log_pi).clamp(max=KL_LOG_RATIO_MAX)
    return d.exp() - d - 1
