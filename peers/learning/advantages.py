"""Advantages: what a completion's reward is compared with.

A formula is a function of (numbers, completions), and of its own options, which are keyword
arguments: `[objective] advantage_options` of a run sets them. It sees all completions of one
optimiser step, the same on every rank, and returns the advantage of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from torch import Tensor

from peers.learning.installed import compute
from swarm.wire.manifest import Objective

STD_EPSILON = 1e-6
"""Added to every standard deviation."""


@dataclass(frozen=True)
class Completions:
    """N completions on all ranks together, the same on each; B of them are this rank's."""

    reward: Tensor
    """fp32 [N]"""
    group: Tensor
    """Index of each one's group, int64 [N]."""
    here: Tensor
    """Indices of this rank's, int64 [B], ascending."""
    length: Tensor
    """Sampled tokens of each, int64 [N]."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """What the rewards are made of, by name, each fp32 [N]; NaN where a reward has no such part."""

    @classmethod
    def of(cls, rewards: Sequence[Sequence[float]], lengths: Tensor | None = None) -> Self:
        """Completions of groups with these rewards, all on this rank."""
        flat = torch.tensor([reward for group in rewards for reward in group]).float()
        sizes = torch.tensor([len(group) for group in rewards])
        group = torch.arange(len(rewards)).repeat_interleave(sizes)
        none = torch.zeros_like(group)
        return cls(flat, group, torch.arange(len(flat)), none if lengths is None else lengths)

    @property
    def size(self) -> Tensor:
        """Completions in each one's group, int64 [N]."""
        return torch.bincount(self.group)[self.group]

    def mean(self, values: Tensor) -> Tensor:
        """Mean of values [N] over each one's group, fp64 [N]."""
        sums = torch.zeros(int(self.group.max()) + 1, dtype=torch.float64)
        return sums.index_add(0, self.group, values.double())[self.group] / self.size

    def centred(self, values: Tensor) -> Tensor:
        """Values [N] less the mean of each one's group, fp64 [N]."""
        return values.double() - self.mean(values)

    def normalised(self, values: Tensor) -> Tensor:
        """Centred values, divided by the sample's standard deviation in each one's group."""
        centred = self.centred(values)
        variance = self.mean(centred.square()) * self.size / (self.size - 1).clamp(min=1)
        return centred / (variance.sqrt() + STD_EPSILON)


def advantages(
    objective: Objective,
    completions: Completions,
    length_max: int = 0,
    problems: list[str] | None = None,
) -> Tensor:
    """The advantage of each completion, fp32 [N], after the soft overlong punishment.

    That falls from 0 at `overlong_tokens` before the run's length limit, `length_max`, to
    −`overlong_penalty` at the limit (DAPO, arXiv 2503.14476, eq. 13). `problems` is as in
    `peers.learning.installed.compute`."""
    if objective.overlong_tokens:
        beyond = completions.length - length_max + objective.overlong_tokens
        share = (beyond / objective.overlong_tokens).clamp(0, 1)
        penalty = -objective.overlong_penalty * share
        parts = {**completions.parts, "overlong": penalty} if completions.parts else {}
        completions = replace(completions, reward=completions.reward + penalty, parts=parts)
    reward = completions.reward
    return compute("advantage", FORMULAS, objective, completions, reward, problems)[0].float()


def divisor(rewards: Tensor, objective: Objective) -> Tensor:
    """The number [1] by which `group` and `rloo` divide r − mean of a group's rewards [G]."""
    size = len(rewards)
    if size < 2:
        return torch.ones(1)
    if objective.advantage == "rloo":
        return torch.full((1,), (size - 1) / size)
    if not objective.normalise_by_std or objective.name == "dr_grpo":
        return torch.ones(1)
    return rewards.std(-1, keepdim=True) + STD_EPSILON


def group(numbers: Objective, completions: Completions) -> Tensor:
    """r − mean of the group, divided by its std if `normalise_by_std` (GRPO, arXiv 2402.03300,
    §4.1.2); not Dr. GRPO."""
    if not numbers.normalise_by_std or numbers.name == "dr_grpo":
        return completions.centred(completions.reward)
    return completions.normalised(completions.reward)


def rloo(numbers: Objective, completions: Completions) -> Tensor:
    """r − mean of the group's others (RLOO, arXiv 2402.14740, eq. 8)."""
    size = completions.size
    return completions.centred(completions.reward) * size / (size - 1).clamp(min=1)


def maxrl(numbers: Objective, completions: Completions) -> Tensor:
    """(r − mean) / mean of the group, for rewards of 0 or more; 0 where the mean is 0. It follows
    the likelihood of a right answer, to the order of the group's size (MaxRL, arXiv 2602.02710)."""
    mean = completions.mean(completions.reward)
    return torch.where(mean > 0, completions.centred(completions.reward) / mean, 0.0)


def batch(
    numbers: Objective, completions: Completions, *, mean: Literal["tokens", "prompts"] = "tokens"
) -> Tensor:
    """r − mean of the group, divided by the std of that over the batch (ScaleRL, arXiv 2510.13786;
    REINFORCE++-baseline, arXiv 2501.03262).

    `mean = "prompts"`: times the mean of all completions' lengths over that of the group's, so that
    in a mean over the batch's tokens every group of one size counts alike (ScaleRL, §3.2)."""
    advantage = _whitened(completions.centred(completions.reward))
    if mean == "tokens":
        return advantage
    length = completions.length.double()
    return advantage * length.mean() / completions.mean(length).clamp(min=1)


def reinforce_pp(numbers: Objective, completions: Completions) -> Tensor:
    """(r − mean) / std over the whole batch, without groups (REINFORCE++, arXiv 2501.03262)."""
    return _whitened(completions.reward.double())


NO_WEIGHTS: dict[str, float] = {}


def gdpo(
    numbers: Objective, completions: Completions, *, weights: dict[str, float] = NO_WEIGHTS
) -> Tensor:
    """Σ_k w_k·(p_k − mean)/std of the group over the parts p of a reward, then (A − mean)/std over
    the batch: a sum would hide which parts differ (GDPO, arXiv 2601.05242). w_k is 1 unless given;
    without parts, the reward is the only one."""
    total = torch.zeros(len(completions.reward), dtype=torch.float64)
    for name, values in (completions.parts or {"reward": completions.reward}).items():
        total += weights.get(name, 1.0) * completions.normalised(values.nan_to_num(0.0))
    return _whitened(total)


FORMULAS: dict[str, Callable[..., Tensor]] = {
    each.__name__: each for each in (group, rloo, maxrl, batch, reinforce_pp, gdpo)
}


def _whitened(values: Tensor) -> Tensor:
    """(Values − mean) / std over the batch."""
    return (values - values.mean()) / (values.std(correction=min(1, len(values) - 1)) + STD_EPSILON)
