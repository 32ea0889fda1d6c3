"""Batches: the tensors of the judged rollouts that have something to teach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peers.trainer.learning.objective import advantages
from swarm.messages import Objective
from swarm.rollouts.rollout import Rollout


@dataclass(frozen=True)
class Group:
    """One task and its G rollouts, as a validator accepted them."""

    rollouts: Sequence[Rollout]
    rewards: Sequence[float]
    """One per rollout, from the validator's verdict; the worker's own rewards are never read."""
    policy: int
    """The policy that generated the rollouts."""
    kept: bool = True
    """False: the online filter leaves the group out; it still counts in the metrics."""
    temperature: float = 1.0
    """Sampling temperature: log-probabilities are of logits / temperature."""

    def __post_init__(self) -> None:
        if not self.rollouts or len(self.rewards) != len(self.rollouts):
            raise ValueError(f"{len(self.rewards)} rewards for {len(self.rollouts)} rollouts")
        if not all(map(math.isfinite, self.rewards)):
            raise ValueError("a reward is not finite")


@dataclass(frozen=True)
class Batch:
    """B sequences, each with all tokens of a rollout, concatenated without padding.

    Results per token are flat, rollout by rollout: [n], n = completion tokens, which the model
    sampled. Tokens of prompts and environments are inputs only.
    """

    tokens: Tensor
    """Token ids, int64 [T]."""
    sampled: Tensor
    """The loss mask, bool [T]: false for a sequence's first token, true for its last."""
    lengths: Tensor
    """Tokens of each sequence, int64 [B]."""
    completion_lengths: Tensor
    """Sampled tokens of each sequence, int64 [B]."""
    advantage: Tensor
    """Advantage of each sequence, fp32 [B]."""
    policy: Tensor
    """Number of the policy that generated each sequence, int64 [B]."""
    temperature: Tensor
    """Sampling temperature of each sequence, fp64 [B]."""

    def __len__(self) -> int:
        return len(self.lengths)

    def token_count(self) -> int:
        """The number n of completion tokens."""
        return int(self.completion_lengths.sum())

    def per_token(self, values: Tensor) -> Tensor:
        """Values [B] of sequences → [n] of their completion tokens."""
        return values.repeat_interleave(self.completion_lengths)

    def split(self, values: Tensor) -> list[Tensor]:
        """Values [T] → B views, one per sequence."""
        parts = values.split(self.lengths.tolist())  # type: ignore[no-untyped-call]
        return list(parts)

    def rows(self, index: Tensor) -> Batch:
        """The sequences at `index` (int64 or bool [B])."""
        picked = torch.arange(len(self))[index].tolist()

        def join(values: Tensor) -> Tensor:
            parts = self.split(values)
            return torch.cat([parts[row] for row in picked]) if picked else values[:0]

        return Batch(
            tokens=join(self.tokens),
            sampled=join(self.sampled),
            lengths=self.lengths[index],
            completion_lengths=self.completion_lengths[index],
            advantage=self.advantage[index],
            policy=self.policy[index],
            temperature=self.temperature[index],
        )


def informative(groups: Sequence[Group]) -> list[Group]:
    """The groups to train on: kept by the filter, and with rewards that differ.

    In the other groups every advantage, and so the gradient, is 0.
    """
    return [group for group in groups if group.kept and max(group.rewards) > min(group.rewards)]


def make_batch(groups: Sequence[Group], objective: Objective) -> Batch:
    """Make a batch with one sequence per rollout, groups in order; `ValueError` if none."""
    if not groups:
        raise ValueError("a batch needs a group")
    rows = [(group, rollout) for group in groups for rollout in group.rollouts]
    return Batch(
        tokens=torch.tensor([token for _, rollout in rows for token in rollout.tokens]),
        sampled=torch.tensor(
            [
                segment.kind == "model"
                for _, rollout in rows
                for segment in rollout.segments
                for _ in segment.tokens
            ]
        ),
        lengths=torch.tensor([len(rollout.tokens) for _, rollout in rows]),
        completion_lengths=torch.tensor([len(rollout.model_tokens) for _, rollout in rows]),
        advantage=torch.cat(
            [advantages(torch.tensor(g.rewards).float(), objective) for g in groups]
        ),
        policy=torch.tensor([group.policy for group, _ in rows]),
        temperature=torch.tensor([group.temperature for group, _ in rows], dtype=torch.float64),
    )
