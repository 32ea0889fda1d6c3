"""From judged rollouts to tensors: drop the groups that teach nothing, join the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peers.trainer.learning.objective import advantages
from swarm.messages import Objective


@dataclass(frozen=True)
class Group:
    """One prompt and its G completions, as a validator accepted them."""

    prompt: Sequence[int]
    completions: Sequence[Sequence[int]]
    rewards: Sequence[float]
    """One a completion, from the validator's verdict; a worker's own are never read."""
    policy: int
    """The policy that generated the completions."""
    log_probabilities: Sequence[Sequence[float]] | None = None
    """What the worker's engine reports; compared and shown, never trained on."""
    kept: bool = True
    """False: the online filter leaves it out; it counts in the metrics all the same."""
    temperature: float = 1.0
    """Of its sampling: log-probabilities are those of logits / temperature."""

    def __post_init__(self) -> None:
        if not self.prompt or not self.completions or not all(self.completions):
            raise ValueError("a group has an empty prompt, no completions, or an empty completion")
        if len(self.rewards) != len(self.completions):
            raise ValueError(f"{len(self.rewards)} rewards for {len(self.completions)} completions")
        if self.log_probabilities is not None and list(map(len, self.log_probabilities)) != list(
            map(len, self.completions)
        ):
            raise ValueError("a completion has other log-probabilities than tokens")
        if not all(map(math.isfinite, self.rewards)):
            raise ValueError("a reward is not finite")


@dataclass(frozen=True)
class Batch:
    """B sequences, each a prompt and its completion, one behind the other without padding.

    Results per token are flat, completion by completion: [n], n = completion tokens.
    """

    tokens: Tensor
    """int64 [T]: prompt, completion, prompt, completion, ..."""
    prompt_lengths: Tensor
    """int64 [B]."""
    completion_lengths: Tensor
    """int64 [B]."""
    advantage: Tensor
    """fp32 [B]."""
    policy: Tensor
    """int64 [B]."""
    temperature: Tensor
    """fp64 [B]."""

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def token_count(self) -> int:
        """n: completion tokens."""
        return int(self.completion_lengths.sum())

    def per_token(self, values: Tensor) -> Tensor:
        """Values [B] of completions → [n] of their tokens."""
        return values.repeat_interleave(self.completion_lengths)

    def lengths(self) -> Tensor:
        """int64 [B]: prompt and completion together."""
        return self.prompt_lengths + self.completion_lengths

    def sequences(self) -> list[Tensor]:
        """B tensors, int64: views of `tokens`."""
        parts = self.tokens.split(self.lengths().tolist())  # type: ignore[no-untyped-call]
        return list(parts)

    def rows(self, index: Tensor) -> Batch:
        """The sequences at `index` (int64 or bool [B])."""
        sequences = self.sequences()
        picked = torch.arange(len(self))[index].tolist()
        return Batch(
            tokens=torch.cat([sequences[row] for row in picked]) if picked else self.tokens[:0],
            prompt_lengths=self.prompt_lengths[index],
            completion_lengths=self.completion_lengths[index],
            advantage=self.advantage[index],
            policy=self.policy[index],
            temperature=self.temperature[index],
        )


def informative(groups: Sequence[Group]) -> list[Group]:
    """The groups to train on: kept by the filter, and with rewards that differ (in the others
    every advantage is 0, and so the gradient)."""
    return [group for group in groups if group.kept and max(group.rewards) > min(group.rewards)]


def make_batch(groups: Sequence[Group], objective: Objective) -> Batch:
    """One sequence per completion, groups in order; raises `ValueError` when there are none."""
    if not groups:
        raise ValueError("a batch needs a group")
    rows = [(group, completion) for group in groups for completion in group.completions]
    return Batch(
        tokens=torch.tensor(
            [token for group, completion in rows for token in (*group.prompt, *completion)]
        ),
        prompt_lengths=torch.tensor([len(group.prompt) for group, _ in rows]),
        completion_lengths=torch.tensor([len(completion) for _, completion in rows]),
        advantage=torch.cat(
            [advantages(torch.tensor(g.rewards).float(), objective) for g in groups]
        ),
        policy=torch.tensor([group.policy for group, _ in rows]),
        temperature=torch.tensor([group.temperature for group, _ in rows], dtype=torch.float64),
    )
