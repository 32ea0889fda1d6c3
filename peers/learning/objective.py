"""The loss of a batch: the shares that a formula gives its tokens, KL terms and an entropy bonus.

Every tensor is flat, one entry per completion token, so padding and packing do not matter here.
Sums are divided by numbers of the *whole* batch (`Totals`), so the losses, gradients and metrics of
its parts (micro-batches, ranks) simply add up. A part holds whole completions."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peers.learning.formulas import AVERAGES, FORMULAS, LOG_RATIO_MAX, Tokens, log_ratio
from peers.learning.installed import compute
from swarm.wire.manifest import Objective

KL_MAX = 10.0
"""Bound on the KL estimate of one token: without it, one token's e^d could swamp the batch."""


@dataclass(frozen=True)
class Totals:
    """Totals of the whole optimiser batch, over all ranks and micro-batches."""

    tokens: int
    """Completion tokens."""
    completions: float
    """Completions of a full optimiser batch (`groups_per_step` × G / `optimiser_steps`), however
    many of them have something to teach. The divisor of all averages but that over tokens: a
    group's weight then does not depend on how many of the other groups are kept."""
    completion_tokens_max: int = 0
    """The run's length limit; only the average `limit` needs it."""


def loss(
    objective: Objective, tokens: Tokens, totals: Totals, problems: list[str] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, to be minimised, of a part of a batch's tokens, and its metrics.

    loss = policy loss + (kl_coefficient · Σ KL + sampler_kl_coefficient · Σ log²(π/μ) −
    entropy_coefficient · Σ H) / tokens. Metrics are detached scalars: sums over these tokens
    divided by `totals.tokens`, except `loss` and `loss_policy`, which have the loss's own
    denominators. `describe` turns the metrics, added up over the parts, into the figures to show.
    `problems` is as in `peers.learning.installed.compute`."""
    if objective.teacher_weight:
        if tokens.log_teacher is None:
            raise ValueError("teacher_weight is not 0 but there is no teacher")
        untaught = tokens.log_teacher.isnan()
        gap = tokens.log_teacher - tokens.log_pi.detach()  # prime-rl's; see docs/objectives.md
        gap = gap.masked_fill(untaught, 0)
        mixed = torch.lerp(tokens.advantage, gap, objective.teacher_weight)
        tokens = replace(tokens, advantage=mixed)
    share, left_alone = compute("objective", FORMULAS, objective, tokens, tokens.log_pi, problems)
    if objective.drift_max:
        drift = tokens.mean(tokens.log_mu - tokens.log_pi.detach())
        left_alone["outside_drift"] = (drift > objective.drift_max) & (tokens.advantage < 0)
        share = share.masked_fill(left_alone["outside_drift"], 0)
    total = policy = _averaged(objective, share, tokens, totals)
    of_mu = log_ratio(tokens.log_pi, tokens.log_mu)
    with torch.no_grad():
        weight, ratio = of_mu.exp(), tokens.log_ratio.exp()
        sums = {
            **{name: mask.sum() for name, mask in left_alone.items()},
            "ratio": ratio.sum(),
            "ratio_squared": ratio.square().sum(),
            "weight": weight.sum(),
            "weight_squared": weight.square().sum(),
            "kl_generation": k3(tokens.log_mu, tokens.log_pi).sum(),
            "entropy": tokens.entropy.sum(),
        }
    if objective.teacher_weight:
        sums |= {"kl_teacher": -gap.sum(), "untaught": untaught.sum()}
    if objective.kl_coefficient:
        if tokens.log_reference is None:
            raise ValueError("kl_coefficient is not 0 but there are no reference log-probabilities")
        if objective.kl_estimate == "k2":
            kl = log_ratio(tokens.log_pi, tokens.log_reference).square() / 2
        else:
            kl = k3(tokens.log_reference, tokens.log_pi)
        if objective.kl_by_ratio:
            kl = of_mu.exp() * kl
        sums["kl_reference"] = kl.detach().sum()
        total = total + objective.kl_coefficient * kl.sum() / totals.tokens
    if objective.sampler_kl_coefficient:
        total = total + objective.sampler_kl_coefficient * of_mu.square().sum() / totals.tokens
    if objective.entropy_coefficient:
        total = total - objective.entropy_coefficient * tokens.entropy.sum() / totals.tokens
    metrics = {name: value.detach() / totals.tokens for name, value in sums.items()}
    return total, {"loss": total.detach(), "loss_policy": policy.detach(), **metrics}


def describe(metrics: dict[str, float]) -> dict[str, float]:
    """Turn the metrics of a whole batch into figures to show.

    `ratio_std`: standard deviation of r. `effective_share`: Kish's effective sample size
    (Σw)²/Σw², w = π/μ, as a share of the tokens: 1 on-policy, near 0 when few tokens carry all the
    weight."""
    shown = {name: value for name, value in metrics.items() if not name.endswith("_squared")}
    shown["ratio_std"] = max(0.0, metrics["ratio_squared"] - metrics["ratio"] ** 2) ** 0.5
    shown["effective_share"] = shown.pop("weight") ** 2 / max(1e-30, metrics["weight_squared"])
    return shown


def k3(log_other: Tensor, log_pi: Tensor) -> Tensor:
    """e^d − d − 1 with d = log other − log π: KL(π ‖ other) per token, never negative.

    The value is unbiased on tokens drawn from π (Schulman, "Approximating KL divergence", 2020).
    Its gradient is not: on such tokens it averages to ∇KL(other ‖ π), because the tokens' own
    probabilities are not differentiated. `kl_by_ratio` does that, which gives ∇KL(π ‖ other).

    The value is clamped to 10. Where d > 0 the gradient ends there too. Where d < 0 it goes on,
    since it tends to 1: as π outgrows the other policy, the term must keep pulling π back."""
    d = (log_other - log_pi).clamp(max=LOG_RATIO_MAX)
    value = d.expm1() - d
    clamped = value.clamp(max=KL_MAX)
    return torch.where(d < 0, clamped.detach() + (value - value.detach()), clamped)


def _averaged(objective: Objective, share: Tensor, tokens: Tokens, totals: Totals) -> Tensor:
    """The part's sum of shares, divided as `Objective.average` says."""
    published = AVERAGES.get(objective.name, "tokens")
    average = published if objective.average == "published" else objective.average
    if average == "tokens":
        return share.sum() / totals.tokens
    if average == "completions":
        share = share / tokens.total(torch.ones_like(share))
    if average != "limit":
        return share.sum() / totals.completions
    if totals.completion_tokens_max < 1:
        raise ValueError("an average over the limit needs the run's length limit")
    return share.sum() / (totals.completions * totals.completion_tokens_max)
