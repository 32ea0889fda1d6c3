"""The formulas of objectives: each token's share of the policy loss.

A formula is a function of (numbers, tokens), and of its own options, which are keyword arguments:
`[objective] options` of a run sets them. It returns each token's share, and masks of the tokens
that it clips or leaves without gradient. `objective.py` makes a loss of the shares;
`docs/objectives.md` says what each formula is for.

Notation: π is the learner, μ the policy that generated (as `behaviour` says), old the ratio's
denominator, A the advantage, r = π/old, s = (Π_t r_t)^(1/length) of a completion; sg stops the
gradient. Many published formulas let the loss of a token with A < 0 grow with its ratio without
limit. Here δ bounds that ratio in all of them: the dual clip of Ye et al. (arXiv 1912.09729, eq.
6). The formulas below leave it out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from swarm.wire.manifest import Objective

LOG_RATIO_MAX = 20.0
"""Log-ratios are clamped to ± this before exp: a clamped infinite ratio has gradient NaN."""


@dataclass(frozen=True)
class Tokens:
    """n completion tokens of whole completions, flat; each field is fp32 [n] unless noted."""

    log_pi: Tensor
    """The learner's log-probabilities, with gradient."""
    log_old: Tensor
    """The ratio's denominator: log μ, or the weights at the start of the optimisation step."""
    log_mu: Tensor
    """Log-probabilities under the policy that generated, as `Objective.behaviour` says."""
    advantage: Tensor
    entropy: Tensor
    """Entropy of the learner's distribution, in nats."""
    completion: Tensor
    """Index of each token's completion, int64 [n]; completions are always whole."""
    log_reference: Tensor | None = None
    """Log-probabilities under the reference; needed when the KL coefficient is not 0."""
    completions: int = 0
    """More than any index in `completion`; only formulas of whole completions need it."""

    log_teacher: Tensor | None = None
    """Log-probabilities under the teacher, NaN: it cannot say; needed if its weight is not 0."""

    @property
    def log_ratio(self) -> Tensor:
        """log r"""
        return log_ratio(self.log_pi, self.log_old)

    def total(self, values: Tensor) -> Tensor:
        """Sum of values [n] over each token's completion, [n]."""
        sums = values.new_zeros(self.completions).index_add(0, self.completion, values)
        return sums[self.completion]

    def mean(self, values: Tensor) -> Tensor:
        """Mean of values [n] over each token's completion, [n]."""
        return self.total(values) / self.total(torch.ones_like(values))


Share = tuple[Tensor, dict[str, Tensor]]
"""Loss per token, fp32 [n], and masks, bool [n], of tokens that the objective clips or drops."""

Positive = Annotated[float, Meta(gt=0, le=1e6)]
Pair = tuple[Positive, Positive]
"""Of an option by the sign of A, or a range."""
Portion = Annotated[float, Meta(gt=0, le=1)]


def log_ratio(log_above: Tensor, log_below: Tensor) -> Tensor:
    return (log_above - log_below).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def clipped(numbers: Objective, tokens: Tokens, ratio: Tensor | None = None) -> Share:
    """−min(min(r, δ)·A, clip(r, 1 − ε, 1 + ε_high)·A), of `ratio` instead of r if given.

    PPO's clipping (arXiv 1707.06347) with a second side (INTELLECT-2, arXiv 2505.07291, §3.4) and a
    wider range above (DAPO, arXiv 2503.14476, eq. 8). Dr. GRPO (arXiv 2503.20783, §3.2) divides it
    by completions · limit."""
    ratio = tokens.log_ratio.exp() if ratio is None else ratio
    advantage = tokens.advantage
    low, high = 1 - numbers.epsilon, 1 + (numbers.epsilon_high or numbers.epsilon)
    raw = ratio.clamp(max=numbers.delta)
    share = -torch.minimum(raw * advantage, ratio.clamp(low, high) * advantage)
    return share, {
        "clipped_low": (ratio < low) & (advantage < 0),
        "clipped_high": (ratio > high) & (advantage > 0),
        "clipped_delta": (ratio > numbers.delta) & (advantage < 0),
    }


def _unclipped(numbers: Objective, tokens: Tokens, ratio: Tensor) -> Share:
    """−r·A, with δ."""
    down = tokens.advantage < 0
    share = -torch.where(down, ratio.clamp(max=numbers.delta), ratio) * tokens.advantage
    return share, {"clipped_delta": (ratio > numbers.delta) & down}


def gspo(numbers: Objective, tokens: Tokens) -> Share:
    """−min(s·A, clip(s, 1 − ε, 1 + ε_high)·A), mean over completions (GSPO, arXiv 2507.18071, eq. 5
    to 7). LUSPO (arXiv 2602.05261) multiplies it by the completion's length."""
    return clipped(numbers, tokens, tokens.mean(tokens.log_ratio).exp())


def gmpo(numbers: Objective, tokens: Tokens) -> Share:
    """−A·(Π_t c_t)^(1/length), mean over completions, c = min(r, e^ε_high) where A > 0, else
    max(r, e^−ε): the geometric mean of ratios that are clipped one by one (GMPO, arXiv
    2507.20673)."""
    raw, down = tokens.log_ratio, tokens.advantage < 0
    low, high = -numbers.epsilon, numbers.epsilon_high or numbers.epsilon
    each = torch.where(down, raw.clamp(min=low), raw.clamp(max=high))
    share, left_alone = _unclipped(numbers, tokens, tokens.mean(each).exp())
    left_alone["clipped_low"] = (raw < low) & down & ~left_alone["clipped_delta"]
    left_alone["clipped_high"] = (raw > high) & (tokens.advantage > 0)
    return share, left_alone


def sapo(numbers: Objective, tokens: Tokens, *, tau: Pair = (1.0, 1.05)) -> Share:
    """−σ(τ·(r − 1))·(4/τ)·A, mean over completions of the mean over tokens: a gate that closes
    smoothly where clipping cuts off (SAPO, arXiv 2511.20347)."""
    slope = _by_sign(tokens, tau)
    return -torch.sigmoid(slope * (tokens.log_ratio.exp() - 1)) * 4 / slope * tokens.advantage, {}


def vespo(
    numbers: Objective, tokens: Tokens, *, power: Pair = (2.0, 3.0), decay: Pair = (3.0, 2.0)
) -> Share:
    """−sg(W^k·e^(λ(1 − W)))·A·log π, mean over tokens, W = Π_t π/μ of the completion, k = power,
    λ = decay: stale completions fade out whole (VESPO, arXiv 2602.10693, §3.4)."""
    log_w = tokens.total(tokens.log_pi.detach() - tokens.log_mu)
    log_w = log_w.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    phi = (_by_sign(tokens, power) * log_w + _by_sign(tokens, decay) * (1 - log_w.exp())).exp()
    return -phi * tokens.advantage * tokens.log_pi, {}


def _by_sign(tokens: Tokens, pair: Pair) -> Tensor:
    """The first of a pair where A ≥ 0, else the second, fp32 [n]."""
    first, second = pair
    return torch.full_like(tokens.advantage, first).masked_fill(tokens.advantage < 0, second)


def cispo(numbers: Objective, tokens: Tokens) -> Share:
    """−sg(min(r, weight_max))·A·log π, mean over the tokens: it clips the weight instead of the
    update, so that no token is left out (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5). Like that
    paper's experiments, it uses no lower bound."""
    weight = tokens.log_ratio.detach().exp()
    share = -weight.clamp(max=numbers.weight_max) * tokens.advantage * tokens.log_pi
    return share, {"weights_clipped": weight > numbers.weight_max}


def icepop(numbers: Objective, tokens: Tokens) -> Share:
    """−M(old/μ)·min(r·A, clip(r, 1 − ε, 1 + ε_high)·A), M(k) = k in [band_low, band_high], else 0:
    discards tokens on which trainer and sampler disagree (Ring-1T, arXiv 2510.18855, §IcePop)."""
    weight = log_ratio(tokens.log_old, tokens.log_mu).exp()
    outside = (weight < numbers.band_low) | (weight > numbers.band_high)
    share, left_alone = clipped(numbers, tokens)
    return weight.masked_fill(outside, 0) * share, {**left_alone, "outside_band": outside}


def tis(
    numbers: Objective,
    tokens: Tokens,
    *,
    unit: Literal["token", "sequence", "mean"] = "token",
    beyond: Literal["truncate", "mask"] = "truncate",
) -> Share:
    """−min(old/μ, weight_max)·min(r·A, clip(r, 1 − ε, 1 + ε_high)·A): truncated importance sampling
    (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025).

    `unit`: the weight is a token's, its completion's product, or that product's geometric mean.
    `beyond`: a larger weight is truncated, or its tokens are left out (MIS, as in verl and TRL)."""
    weight = log_ratio(tokens.log_old, tokens.log_mu)
    if unit != "token":
        weight = tokens.total(weight) if unit == "sequence" else tokens.mean(weight)
    weight = weight.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    share, left_alone = clipped(numbers, tokens)
    left_alone["weights_clipped"] = far = weight > numbers.weight_max
    kept = weight.masked_fill(far, 0) if beyond == "mask" else weight.clamp(max=numbers.weight_max)
    return kept * share, left_alone


def decoupled_ppo(numbers: Objective, tokens: Tokens) -> Share:
    """−(old/μ)·min(r·A, clip(r, 1 − ε, 1 + ε_high)·A): the proximal policy, which bounds the step,
    differs from the behaviour policy (Hilton et al., arXiv 2110.00641, eq. 2; AReaL, arXiv
    2505.24298, §5.2)."""
    share, left_alone = clipped(numbers, tokens)
    return log_ratio(tokens.log_old, tokens.log_mu).exp() * share, left_alone


def dppo(numbers: Objective, tokens: Tokens) -> Share:
    """−m·(π/μ)·A; m = 0 where A·(π − μ) > 0 and |π − μ| > change_max, else 1: a token whose
    probability has already moved far in its advantage's direction gets no gradient (DPPO, binary
    total variation, arXiv 2602.04879, §4)."""
    change = (tokens.log_pi.exp() - tokens.log_mu.exp()).detach()
    far = change.abs() > numbers.change_max
    high = far & (change > 0) & (tokens.advantage > 0)
    low = far & (change < 0) & (tokens.advantage < 0)
    share, left_alone = _unclipped(numbers, tokens, log_ratio(tokens.log_pi, tokens.log_mu).exp())
    left_alone["clipped_delta"] &= ~low
    masks = {"clipped_low": low, "clipped_high": high, **left_alone}
    return share.masked_fill(high | low, 0), masks


def clip_cov(
    numbers: Objective, tokens: Tokens, *, portion: Portion = 2e-4, bounds: Pair = (1.0, 5.0)
) -> Share:
    """PPO's clipping, without the gradient of a `portion` of the tokens, drawn from those whose
    covariance lies between the bounds: few tokens cause most of the loss of entropy (Clip-Cov,
    arXiv 2505.22617). The draw depends on the number of tokens alone: a resumed run repeats it."""
    share, left_alone = clipped(numbers, tokens)
    found = _covariance(tokens)
    among = (found > bounds[0]) & (found < bounds[1])
    places = (among & ~torch.stack(list(left_alone.values())).any(0)).nonzero()[:, 0].cpu()
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(len(found)))
    chosen = places[order[: max(1, int(portion * len(found)))]].to(found.device)
    dropped = torch.zeros_like(among).index_fill(0, chosen, True)
    return share.masked_fill(dropped, 0), {**left_alone, "clipped_covariance": dropped}


def kl_cov(
    numbers: Objective, tokens: Tokens, *, portion: Portion = 2e-4, beta: Positive = 1.0
) -> Share:
    """−r·A, plus β·|log r| for the `portion` of the tokens with the highest covariance (KL-Cov,
    arXiv 2505.22617; |log r| is the published code's KL)."""
    share, left_alone = _unclipped(numbers, tokens, tokens.log_ratio.exp())
    count = min(len(share), max(1, int(portion * len(share))))
    highest = _covariance(tokens).topk(count).indices
    pulled = torch.zeros_like(share, dtype=torch.bool).index_fill(0, highest, True)
    penalty = (beta * tokens.log_ratio.abs()).masked_fill(~pulled, 0)
    return share + penalty, {**left_alone, "kl_covariance": pulled}


def _covariance(tokens: Tokens) -> Tensor:
    """(log π − mean)·(A − mean) of each token, without gradient; the means are over one forward
    pass's tokens, as in the published code."""
    log_pi = tokens.log_pi.detach()
    return (log_pi - log_pi.mean()) * (tokens.advantage - tokens.advantage.mean())


FORMULAS: dict[str, Callable[..., Share]] = {
    **dict.fromkeys(("grpo", "dr_grpo", "dapo"), clipped),
    **dict.fromkeys(("gspo", "luspo"), gspo),
    **{
        each.__name__: each
        for each in (gmpo, sapo, vespo, cispo, icepop, tis, decoupled_ppo, dppo, clip_cov, kl_cov)
    },
}

AVERAGES = {"dr_grpo": "limit", "luspo": "sums"}
AVERAGES |= dict.fromkeys(("gspo", "gmpo", "sapo"), "completions")
"""`Objective.average` of the published formulas that are no mean over the batch's tokens."""
