"""From judged rollouts to tensors: drop the groups that teach nothing, pad the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peers.trainer.objective import advantages


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

    def __post_init__(self) -> None:
        if not self.prompt or not self.completions or not all(self.completions):
            raise ValueError("a group has an empty prompt, no completions, or an empty completion")
        if len(self.rewards) != len(self.completions):
            raise ValueError(f"{len(self.rewards)} rewards for {len(self.completions)} completions")
        if not all(map(math.isfinite, self.rewards)):
            raise ValueError("a reward is not finite")


@dataclass(frozen=True)
class Batch:
    """B completions behind their prompts, padded behind to S tokens.

    Per-token results are flat, in the order of `completion` (row by row): [n], n = its count.
    """

    tokens: Tensor
    """int64 [B, S]. Padding (0) comes last, where causal attention cannot see it."""
    completion: Tensor
    """bool [B, S]: tokens that the policy generated."""
    advantage: Tensor
    """fp32 [B]."""
    policy: Tensor
    """int64 [B]."""

    def __len__(self) -> int:
        return len(self.tokens)

    def token_count(self) -> int:
        """n: completion tokens."""
        return int(self.completion.sum())

    def per_token(self, values: Tensor) -> Tensor:
        """Values [B] of completions → [n] of their tokens."""
        return values[:, None].expand(self.completion.shape)[self.completion]

    def rows(self, index: Tensor) -> Batch:
        """The completions at `index` (int64 or bool), cut to the longest among them."""
        lengths = self.lengths()[index]
        longest = int(lengths.max()) if len(lengths) else 0
        return Batch(
            tokens=self.tokens[index, :longest],
            completion=self.completion[index, :longest],
            advantage=self.advantage[index],
            policy=self.policy[index],
        )

    def lengths(self) -> Tensor:
        """int64 [B]: prompt and completion together."""
        positions = torch.arange(1, self.tokens.shape[1] + 1)
        return (self.completion * positions).amax(-1)


def informative(groups: Sequence[Group]) -> list[Group]:
    """The groups whose rewards differ; in the others every advantage is 0, and so the gradient."""
    return [group for group in groups if max(group.rewards) > min(group.rewards)]


def make_batch(groups: Sequence[Group], normalise_by_std: bool) -> Batch:
    """One row per completion, groups in order; raises `ValueError` when there are none."""
    if not groups:
        raise ValueError("a batch needs a group")
    rows = [(group, completion) for group in groups for completion in group.completions]
    starts = torch.tensor([len(group.prompt) for group, _ in rows])[:, None]
    ends = starts + torch.tensor([len(completion) for _, completion in rows])[:, None]
    column = torch.arange(int(ends.max()))
    tokens = torch.zeros(len(rows), len(column), dtype=torch.int64)
    tokens[column < ends] = torch.tensor(
        [token for group, completion in rows for token in (*group.prompt, *completion)]
    )
    return Batch(
        tokens=tokens,
        completion=(column >= starts) & (column < ends),
        advantage=torch.cat(
            [advantages(torch.tensor(g.rewards).float(), normalise_by_std) for g in groups]
        ),
        policy=torch.tensor([group.policy for group, _ in rows]),
    )
