"""The objectives: GRPO with two-sided clipping (INTELLECT-2), and objectives published since.

Every tensor is flat, one entry per completion token, so padding and packing do not matter here.
Sums are divided by numbers of the *whole* batch (`Totals`), so the losses, gradients and metrics of
its parts (micro-batches, ranks) simply add up. A part holds whole completions.

An objective is a function of (its numbers, tokens). It returns each token's share of the policy
loss, and masks of the tokens that it leaves without gradient. Notation: π is the learner, μ the
policy that generated (recomputed by the trainer), old the ratio's denominator, A the advantage, and
r = π/old.

Published formulas other than GRPO's with two sides and CISPO's let the loss of a token with A < 0
grow with its ratio without limit. Here δ bounds that ratio in all of them: the dual clip of Ye et
al. (arXiv 1912.09729, eq. 6). The formulas below leave it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.wire.manifest import Objective

LOG_RATIO_MAX = 20.0
"""Log-ratios are clamped to ± this before exp: a clamped infinite ratio has gradient NaN."""

KL_MAX = 10.0
"""Bound on the KL estimate of one token: without it, one token's e^d could swamp the batch."""

STD_EPSILON = 1e-6
"""Added to the standard deviation of a group's rewards."""


@dataclass(frozen=True)
class Tokens:
    """n completion tokens, as the objectives see them; each field is fp32 [n] unless noted."""

    log_pi: Tensor
    """The learner's log-probabilities, with gradient."""
    log_old: Tensor
    """The ratio's denominator: log μ, or the weights at the start of the optimisation step."""
    log_mu: Tensor
    """Log-probabilities under the policy that generated, recomputed by the trainer."""
    advantage: Tensor
    entropy: Tensor
    """Entropy of the learner's distribution, in nats."""
    completion: Tensor
    """Index of each token's completion, int64 [n]; completions are always whole."""
    log_reference: Tensor | None = None
    """Log-probabilities under the reference; needed when the KL coefficient is not 0."""
    completions: int = 0
    """More than any index in `completion`; only `gspo` needs it."""

    @property
    def ratio(self) -> Tensor:
        """r = π/old."""
        return _ratio(self.log_pi, self.log_old)


@dataclass(frozen=True)
class Totals:
    """Totals of the whole optimiser batch, over all ranks and micro-batches."""

    tokens: int
    """Completion tokens."""
    completions: float
    """Completions of a full optimiser batch (`groups_per_step` × G / `optimiser_steps`), however
    many of them have something to teach. The divisor of `dr_grpo` and `gspo`: a group's weight then
    does not depend on how many of the other groups are kept."""
    completion_tokens_max: int = 0
    """The run's length limit; only `dr_grpo` needs it."""


Share = tuple[Tensor, dict[str, Tensor]]
"""Loss per token, fp32 [n], and masks, bool [n], of tokens that the objective clips or drops."""


def advantages(rewards: Tensor, objective: Objective) -> Tensor:
    """Rewards [..., G] of groups → advantages [..., G]: r − mean, divided by (std + 1e-6) if
    `normalise_by_std`.

    The standard deviation is the sample's (over G − 1). Dr. GRPO never divides by it. `rloo`: r −
    mean of the others (RLOO, arXiv 2402.14740, eq. 8).
    """
    return (rewards - rewards.mean(-1, keepdim=True)) / divisor(rewards, objective)


def divisor(rewards: Tensor, objective: Objective) -> Tensor:
    """The number [..., 1] by which `advantages` divides each group's r − mean."""
    size = rewards.shape[-1]
    one = torch.ones_like(rewards[..., :1])
    if size < 2:
        return one
    if objective.advantage == "rloo":
        return one * ((size - 1) / size)
    if not objective.normalise_by_std or objective.name == "dr_grpo":
        return one
    return rewards.std(-1, keepdim=True) + STD_EPSILON


def loss(objective: Objective, tokens: Tokens, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, to be minimised, of a part of a batch's tokens, and its metrics.

    loss = Σ share / policy denominator + (kl_coefficient · Σ KL − entropy_coefficient · Σ H) /
    tokens. Metrics are detached scalars: sums over these tokens divided by `totals.tokens`, except
    `loss` and `loss_policy`, which have the loss's own denominators. `describe` turns the metrics,
    added up over the parts, into the figures to show.
    """
    share, left_alone = _OBJECTIVES[objective.name](objective, tokens)
    policy = share.sum() / _denominator(objective, totals)
    total = policy
    with torch.no_grad():
        weight = _ratio(tokens.log_pi, tokens.log_mu)
        ratio = tokens.ratio
        sums = {
            **{name: mask.sum() for name, mask in left_alone.items()},
            "ratio": ratio.sum(),
            "ratio_squared": ratio.square().sum(),
            "weight": weight.sum(),
            "weight_squared": weight.square().sum(),
            "kl_generation": k3(tokens.log_mu, tokens.log_pi).sum(),
            "entropy": tokens.entropy.sum(),
        }
    if objective.kl_coefficient:
        if tokens.log_reference is None:
            raise ValueError("kl_coefficient is not 0 but there are no reference log-probabilities")
        kl = k3(tokens.log_reference, tokens.log_pi)
        if objective.kl_by_ratio:
            kl = _ratio(tokens.log_pi, tokens.log_mu) * kl
        sums["kl_reference"] = kl.detach().sum()
        total = total + objective.kl_coefficient * kl.sum() / totals.tokens
    if objective.entropy_coefficient:
        total = total - objective.entropy_coefficient * tokens.entropy.sum() / totals.tokens
    metrics = {name: value.detach() / totals.tokens for name, value in sums.items()}
    return total, {"loss": total.detach(), "loss_policy": policy.detach(), **metrics}


def describe(metrics: dict[str, float]) -> dict[str, float]:
    """Turn the metrics of a whole batch into figures to show.

    `ratio_std`: standard deviation of r. `effective_share`: Kish's effective sample size
    (Σw)²/Σw², w = π/μ, as a share of the tokens: 1 on-policy, near 0 when few tokens carry all the
    weight.
    """
    shown = {name: value for name, value in metrics.items() if not name.endswith("_squared")}
    spread = metrics["ratio_squared"] - metrics["ratio"] ** 2
    shown["ratio_std"] = max(0.0, spread) ** 0.5
    shown["effective_share"] = shown.pop("weight") ** 2 / max(1e-30, metrics["weight_squared"])
    return shown


def k3(log_other: Tensor, log_pi: Tensor) -> Tensor:
    """e^d − d − 1 with d = log other − log π: KL(π ‖ other) per token, never negative.

    The value is unbiased on tokens drawn from π (Schulman, "Approximating KL divergence", 2020).
    Its gradient is not: on such tokens it averages to ∇KL(other ‖ π), because the tokens' own
    probabilities are not differentiated. `kl_by_ratio` does that, which gives ∇KL(π ‖ other).

    The value is clamped to 10. Where d > 0 the gradient ends there too. Where d < 0 it goes on,
    since it tends to 1: as π outgrows the other policy, the term must keep pulling π back.
    """
    d = (log_other - log_pi).clamp(max=LOG_RATIO_MAX)
    value = d.expm1() - d
    clamped = value.clamp(max=KL_MAX)
    return torch.where(d < 0, clamped.detach() + (value - value.detach()), clamped)


# --- the objectives ------------------------------------------------------------------------------


def grpo(objective: Objective, tokens: Tokens) -> Share:
    """−min(min(r, δ)·A, clip(r, 1 − ε, 1 + ε)·A), mean over the batch's tokens.

    Two-sided clipping: δ bounds the loss where A < 0; one-sided clipping lets it grow with r
    without limit (INTELLECT-2, arXiv 2505.07291, §3.4). The published numbers are ε = 0.2, δ = 4.
    """
    return _clipped(objective, tokens)


def dr_grpo(objective: Objective, tokens: Tokens) -> Share:
    """−min(r·A, clip(r, 1 − ε, 1 + ε)·A), Σ over tokens / (completions · L), L the length limit.

    A = reward − group mean. The loss is divided by neither the group's std nor a completion's
    length (Dr. GRPO, arXiv 2503.20783, §3.2 and listing 1).
    """
    return _clipped(objective, tokens)


def dapo(objective: Objective, tokens: Tokens) -> Share:
    """−min(r·A, clip(r, 1 − ε, 1 + ε_high)·A), mean over the batch's tokens.

    Clip-higher and the token-level loss of DAPO (arXiv 2503.14476, eq. 8): ε = 0.2, ε_high = 0.28.
    Its dynamic sampling is the trainer's filter of groups without spread.
    """
    return _clipped(objective, tokens)


def gspo(objective: Objective, tokens: Tokens) -> Share:
    """−min(s·A, clip(s, 1 − ε, 1 + ε_high)·A), mean over completions, s = (Π_t r_t)^(1/length).

    Sequence-level ratios: GSPO (arXiv 2507.18071, eq. 5 to 7), with ε = 3e-4 and ε_high = 4e-4.
    Each token carries 1/length of its completion's loss.
    """
    log_ratio = (tokens.log_pi - tokens.log_old).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    zeros = log_ratio.new_zeros(tokens.completions)
    lengths = zeros.index_add(0, tokens.completion, torch.ones_like(log_ratio))
    sums = zeros.index_add(0, tokens.completion, log_ratio)
    lengths_here = lengths[tokens.completion]
    sequence_ratio = (sums[tokens.completion] / lengths_here).exp()
    share, left_alone = _clipped(objective, tokens, sequence_ratio)
    return share / lengths_here, left_alone


def cispo(objective: Objective, tokens: Tokens) -> Share:
    """−sg(min(r, weight_max))·A·log π, mean over the batch's tokens; sg stops the gradient.

    It clips the weight instead of the update, so that no token is left out (MiniMax-M1, arXiv
    2506.13585, eq. 4 and 5). Like that paper's experiments, it uses no lower bound.
    """
    weight = tokens.ratio.detach()
    share = -weight.clamp(max=objective.weight_max) * tokens.advantage * tokens.log_pi
    return share, {"weights_clipped": weight > objective.weight_max}


def icepop(objective: Objective, tokens: Tokens) -> Share:
    """−M(old/μ)·min(r·A, clip(r, 1 − ε, 1 + ε_high)·A), M(k) = k in [band_low, band_high], else 0.

    Discards tokens on which trainer and sampler disagree (Ring-1T, arXiv 2510.18855, §IcePop:
    band 0.5 to 5). old = step_start.
    """
    weight = _ratio(tokens.log_old, tokens.log_mu)
    outside = (weight < objective.band_low) | (weight > objective.band_high)
    share, left_alone = _clipped(objective, tokens)
    return weight.masked_fill(outside, 0) * share, {**left_alone, "outside_band": outside}


def tis(objective: Objective, tokens: Tokens) -> Share:
    """−min(old/μ, weight_max)·min(r·A, clip(r, 1 − ε, 1 + ε_high)·A), mean over the tokens.

    Truncated importance sampling (Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training", 2025: weight_max = 2). old = step_start.
    """
    weight = _ratio(tokens.log_old, tokens.log_mu)
    share, left_alone = _clipped(objective, tokens)
    left_alone["weights_clipped"] = weight > objective.weight_max
    return weight.clamp(max=objective.weight_max) * share, left_alone


def decoupled_ppo(objective: Objective, tokens: Tokens) -> Share:
    """−(old/μ)·min(r·A, clip(r, 1 − ε, 1 + ε_high)·A), mean over the tokens.

    The proximal policy, which bounds the step, differs from the behaviour policy (Hilton et al.,
    arXiv 2110.00641, eq. 2; AReaL, arXiv 2505.24298, §5.2). old = step_start.
    """
    share, left_alone = _clipped(objective, tokens)
    return _ratio(tokens.log_old, tokens.log_mu) * share, left_alone


def dppo(objective: Objective, tokens: Tokens) -> Share:
    """−m·(π/μ)·A, mean over the tokens; m = 0 where A·(π − μ) > 0 and |π − μ| > change_max, else 1.

    A trust region in probability instead of ratio: a token whose probability has already moved far
    in its advantage's direction gets no gradient (DPPO, binary total variation, arXiv 2602.04879,
    §4: change_max = 0.2).
    """
    ratio = _ratio(tokens.log_pi, tokens.log_mu)
    change = (tokens.log_pi.exp() - tokens.log_mu.exp()).detach()
    far = change.abs() > objective.change_max
    high = far & (change > 0) & (tokens.advantage > 0)
    low = far & (change < 0) & (tokens.advantage < 0)
    bounded = torch.where(tokens.advantage < 0, ratio.clamp(max=objective.delta), ratio)
    share = -(bounded * tokens.advantage).masked_fill(high | low, 0)
    beyond = _beyond(objective, tokens, ratio) & ~low
    return share, {"clipped_low": low, "clipped_high": high, "clipped_delta": beyond}


_OBJECTIVES: dict[str, Callable[[Objective, Tokens], Share]] = {
    function.__name__: function
    for function in (grpo, dr_grpo, dapo, gspo, cispo, icepop, tis, decoupled_ppo, dppo)
}


def _denominator(objective: Objective, totals: Totals) -> float:
    """Divisor of the whole batch's shares."""
    if objective.name == "gspo":
        return totals.completions
    if objective.name == "dr_grpo":
        if totals.completion_tokens_max < 1:
            raise ValueError("dr_grpo needs the run's length limit")
        return totals.completions * totals.completion_tokens_max
    return totals.tokens


def _ratio(log_above: Tensor, log_below: Tensor) -> Tensor:
    return (log_above - log_below).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def _clipped(objective: Objective, tokens: Tokens, ratio: Tensor | None = None) -> Share:
    """−min(min(r, δ)·A, clip(r, 1 − ε, 1 + ε_high)·A): PPO's clipping (arXiv 1707.06347) with δ.

    `ratio` replaces the tokens' own r.
    """
    ratio = tokens.ratio if ratio is None else ratio
    advantage = tokens.advantage
    low, high = 1 - objective.epsilon, 1 + (objective.epsilon_high or objective.epsilon)
    raw = ratio.clamp(max=objective.delta)
    share = -torch.minimum(raw * advantage, ratio.clamp(low, high) * advantage)
    with torch.no_grad():
        left_alone = {
            "clipped_low": (ratio < low) & (advantage < 0),
            "clipped_high": (ratio > high) & (advantage > 0),
            "clipped_delta": _beyond(objective, tokens, ratio),
        }
    return share, left_alone


def _beyond(objective: Objective, tokens: Tokens, ratio: Tensor) -> Tensor:
    """Tokens whose ratio δ bounds, bool [n]."""
    return (ratio > objective.delta) & (tokens.advantage < 0)
