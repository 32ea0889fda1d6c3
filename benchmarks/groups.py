"""Groups whose rollouts are in memory, as benchmarks and tests make them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peers.learning.batch import (
    AcceptedGroups,
    Batch,
    check_rewards,
    rollout_batch,
    share_rows,
    trained_rows,
)
from peers.learning.ranks import Ranks
from swarm.rollouts.rollout import Rollout


@dataclass(frozen=True)
class Group:
    """One task and its G rollouts."""

    rollouts: Sequence[Rollout]
    rewards: Sequence[float]
    """One per rollout."""
    policy: int
    """The policy that generated the rollouts, except those whose spans name several."""
    kept: bool = True
    """False: the online filter leaves the group out; it still counts in the metrics."""
    temperature: float = 1.0
    """Sampling temperature."""
    environment: int = 0
    """Index of its environment."""

    def __post_init__(self) -> None:
        check_rewards([self.rewards], [self.kept], len(self.rollouts))


def make_batch(groups: Sequence[Group]) -> Batch:
    """A batch with one sequence per rollout, groups in order."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return rollout_batch(rollouts, [group.temperature for group in groups for _ in group.rollouts])


def as_accepted(
    groups: Sequence[Group], name: str = "", ranks: Ranks | None = None, *, any_reward: bool = False
) -> list[AcceptedGroups]:
    """This rank's share of the groups, as if they were submissions, one per policy. `any_reward`:
    groups of equal rewards are trained on, too."""
    found: dict[int, list[Group]] = {}
    for group in groups:
        found.setdefault(group.policy, []).append(group)
    return [_accepted(some, name, ranks or Ranks(), any_reward) for some in found.values()]


def _accepted(groups: Sequence[Group], name: str, ranks: Ranks, any_reward: bool) -> AcceptedGroups:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards, kept = [group.rewards for group in groups], [group.kept for group in groups]
    whole = make_batch(groups)
    trained = trained_rows(rewards, kept, any_reward=any_reward)
    rows = share_rows(name, rewards, trained, whole.lengths, ranks)
    mine = [rollouts[row] for row in rows.tolist()]
    temperatures = [group.temperature for group in groups for _ in group.rollouts]
    here = rollout_batch(mine, [temperatures[row] for row in rows.tolist()])
    policy = groups[0].policy
    return AcceptedGroups(
        name=name,
        policies=sorted(set(_policies(rollouts, policy).tolist())),
        rewards=rewards,
        trained=trained,
        all_completion_lengths=whole.completion_lengths,
        environment=torch.tensor([each.environment for each in groups for _ in each.rollouts]),
        truncated=torch.tensor([each.segments[-1].finish == "length" for each in rollouts]),
        rows=rows,
        tokens=here.tokens,
        sampled=here.sampled,
        lengths=here.lengths,
        temperature=here.temperature,
        token_policies=_policies(mine, policy),
        reported=_reported(mine),
    )


def _policies(rollouts: Sequence[Rollout], policy: int) -> Tensor:
    """The policy of each completion token, int64 [n]; `policy` where a rollout has only one."""
    numbers: list[int] = []
    for rollout in rollouts:
        spans = rollout.spans
        if len(spans) > 1:
            numbers += [span.policy for span in spans for _ in range(span.tokens)]
        else:
            numbers += [policy] * len(rollout.model_tokens)
    return torch.tensor(numbers).long()


def _reported(rollouts: Sequence[Rollout]) -> Tensor:
    """The engines' own log-probabilities, fp32 [n]; NaN for rollouts without them."""
    values: list[float] = []
    for rollout in rollouts:
        found = rollout.log_probabilities
        values += [math.nan] * len(rollout.model_tokens) if found is None else found
    return torch.tensor(values).float()
