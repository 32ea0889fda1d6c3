"""Batches: the tensors of the judged rollouts that have something to teach.

No rank holds a whole batch. The sequences of each submission are divided over the ranks on their
own, so that a submission can be scored before the rest of its batch has arrived."""

import math
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from peers.learning.advantages import Completions
from peers.learning.ranks import Ranks
from swarm.rollouts.rollout import Rollout
from swarm.wire.messages import RewardParts


@dataclass(frozen=True)
class Batch:
    """B sequences, each with all tokens of a rollout, concatenated without padding.

    Results per token are flat, rollout by rollout: [n], n = completion tokens, which the model
    sampled. Tokens of prompts and environments are inputs only."""

    tokens: Tensor
    """Token ids, int64 [T]."""
    sampled: Tensor
    """The loss mask, bool [T]: false for a sequence's first token, true for its last."""
    lengths: Tensor
    """Tokens of each sequence, int64 [B]."""
    completion_lengths: Tensor
    """Sampled tokens of each sequence, int64 [B]."""
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

    def only(self, kept: Tensor) -> "Batch":
        """Some of the sequences, bool [B]."""
        here = kept.repeat_interleave(self.lengths)
        of_each = (self.lengths, self.completion_lengths, self.temperature)
        return Batch(self.tokens[here], self.sampled[here], *(each[kept] for each in of_each))

    def split(self, values: Tensor) -> list[Tensor]:
        """Values [T] → B views, one per sequence."""
        return list(values.split(self.lengths.tolist()))  # type: ignore[no-untyped-call]


def join(batches: Sequence[Batch]) -> Batch:
    """One batch of the sequences of several, in order."""
    return Batch(*(torch.cat([vars(each)[name] for each in batches]) for name in _FIELDS))


_FIELDS = tuple(Batch.__dataclass_fields__)


def rollout_batch(rollouts: Sequence[Rollout], temperatures: Sequence[float]) -> Batch:
    flat = [each for rollout in rollouts for each in rollout.segments]
    return Batch(
        tokens=torch.tensor([token for each in flat for token in each.tokens]).long(),
        sampled=torch.tensor([each.kind == "model" for each in flat for _ in each.tokens]).bool(),
        lengths=torch.tensor([len(each.tokens) for each in rollouts]).long(),
        completion_lengths=torch.tensor([len(each.model_tokens) for each in rollouts]).long(),
        temperature=torch.tensor(temperatures, dtype=torch.float64),
    )


@dataclass(eq=False)
class AcceptedGroups:
    """The groups of one accepted submission, and this rank's share of their sequences.

    Groups that have nothing to teach count in the metrics, but no rank holds their sequences. B is
    the number of this rank's sequences, n of their completion tokens."""

    name: str
    """The submission's digest, in hexadecimal; empty outside a run."""
    policies: Sequence[int]
    """The policies that sampled the rollouts, ascending; the same on all ranks."""
    rewards: Sequence[Sequence[float]]
    """[groups][G] From the validator's verdict; the worker's own rewards are never read."""
    trained: Tensor
    """Sequences to train on, bool [all] (`trained_rows`)."""
    ungraded: Sequence[int] = field(default_factory=list, kw_only=True)
    """Indices of groups whose rewards mean nothing."""
    parts: RewardParts = field(default_factory=RewardParts, kw_only=True)
    """What the rewards are made of, from the verdict."""
    all_completion_lengths: Tensor
    """Sampled tokens of every sequence of the submission, int64 [all]."""
    environment: Tensor
    """Index of each sequence's environment, int64 [all]."""
    truncated: Tensor
    """Whether the length limit cut off each sequence, bool [all]."""
    rows: Tensor
    """This rank's sequences, as indices among all, int64 [B], ascending."""
    tokens: Tensor
    """Token ids of this rank's sequences, int [T]."""
    sampled: Tensor
    """Whether the model sampled each token, bool [T]."""
    lengths: Tensor
    """Tokens of each sequence, int64 [B]."""
    temperature: Tensor
    """Sampling temperature of each sequence, fp64 [B]: log-probabilities are of logits over it."""
    token_policies: Tensor
    """The policy that sampled each completion token, int64 [n]."""
    reported: Tensor
    """Log-probabilities that the worker's engine reported, else NaN, fp32 [n]; never trained on."""
    log_mu: Tensor | None = None
    """log μ of each completion token by its sampling policy, fp32 [n]; None until scored."""
    scored: set[int] = field(default_factory=set)
    """The policies whose tokens `log_mu` is complete for."""
    log_reference: Tensor | None = None
    """Log-probabilities under the reference, fp32 [n]; None until scored."""
    log_teacher: Tensor | None = None
    """Log-probabilities under the teacher, fp32 [n]; NaN: it cannot say; None until scored."""
    teacher_prompts: Sequence[Sequence[int]] | None = None
    """[B] Token ids of the prompts that the teacher sees; empty: none; None: the sequences' own."""
    token_advantage: Tensor | None = None
    """Each completion token's advantage, fp32 [n], on the host; None: its completion's."""

    def __post_init__(self) -> None:
        self._group = _group_of_row(self.rewards)
        self.informative = sorted(set(self._group[self.trained].tolist()))
        self._completion_lengths = self.all_completion_lengths[self.rows]

    def environments(self, groups: Collection[int]) -> Tensor:
        """The environment of each of this rank's sequences of some groups, int64."""
        return self.environment[self.rows][_among(self._group[self.rows], groups)]

    @property
    def oldest(self) -> int:
        """The oldest policy that sampled a token: the rollouts' age is its age."""
        return self.policies[0]

    def add_log_mu(self, policy: int, values: Tensor) -> None:
        """Take the log-probabilities [n] under a policy as μ of the tokens that it sampled."""
        own = (self.token_policies == policy).to(values.device)
        kept = torch.zeros_like(values) if self.log_mu is None else self.log_mu
        self.log_mu = torch.where(own, values, kept)
        self.scored.add(policy)

    def tokens_in(self, groups: Collection[int]) -> int:
        """Completion tokens of some groups to train on, on all ranks together."""
        trained = self.trained & _among(self._group, groups)
        return int(self.all_completion_lengths[trained].sum())

    def batch(self, groups: Collection[int]) -> Batch:
        """This rank's sequences of some of the informative groups."""
        lengths = (self.lengths, self._completion_lengths)
        everything = Batch(self.tokens.long(), self.sampled, *lengths, self.temperature)
        return everything.only(_among(self._group[self.rows], groups))

    def completions(self, groups: Collection[int]) -> Completions:
        """All completions of some groups, whichever rank holds them."""
        chosen = _among(self._group, groups)
        rewards = torch.tensor([reward for group in self.rewards for reward in group])
        here = self.rows[_among(self._group[self.rows], groups)]
        names, count = self.parts.names, len(rewards)
        fits = len(self.parts.values) == 4 * len(names) * count
        values = torch.tensor(np.frombuffer(self.parts.values, "<f4")) if fits else rewards[:0]
        return Completions(
            reward=rewards[chosen],
            group=self._group[chosen],
            here=(chosen.cumsum(0) - 1)[here],
            length=self.all_completion_lengths[chosen],
            parts={name: values[at * count :][:count][chosen] for at, name in enumerate(names)}
            if fits
            else {},
        )

    def of(self, groups: Collection[int], values: Tensor) -> Tensor:
        """Values [n] of this rank's completion tokens → those of some groups."""
        here = _among(self._group[self.rows], groups)
        tokens = here.repeat_interleave(self._completion_lengths).nonzero()[:, 0]
        return values[tokens.to(values.device)]


def trained_rows(
    rewards: Sequence[Sequence[float]],
    kept: Sequence[bool],
    *,
    any_reward: bool = False,
    left_out: Tensor | None = None,
) -> Tensor:
    """Sequences to train on, bool [all]: those of groups that the filter keeps and, unless
    `any_reward`, whose rewards differ; without those `left_out`, bool [all].

    In the other groups every advantage, and so the gradient, is 0."""
    pairs = zip(rewards, kept, strict=True)
    teaches = [keep and (any_reward or max(group) > min(group)) for group, keep in pairs]
    rows = torch.tensor(teaches)[_group_of_row(rewards)]
    return rows if left_out is None else rows & ~left_out


def check_rewards(rewards: Sequence[Sequence[float]], kept: Sequence[bool], rollouts: int) -> None:
    """Raise `ValueError` unless every rollout has a finite reward, and every group a label."""
    count = sum(map(len, rewards))
    if count != rollouts or not count or not all(map(len, rewards)):
        raise ValueError(f"{count} rewards for {rollouts} rollouts")
    if len(kept) != len(rewards):
        raise ValueError(f"{len(kept)} labels for {len(rewards)} groups")
    if not all(math.isfinite(reward) for group in rewards for reward in group):
        raise ValueError("a reward is not finite")


def share_rows(
    name: str, rewards: Sequence[Sequence[float]], trained: Tensor, lengths: Tensor, ranks: Ranks
) -> Tensor:
    """Indices of a submission's sequences that this rank computes: int64, ascending.

    `lengths`: tokens of each sequence, int64 [all]. Groups are divided one after the other, since
    an optimiser step may train on some of them only. Every rank computes the same division, and
    different submissions begin it at different ranks."""
    group = _group_of_row(rewards)
    rows = trained.nonzero()[:, 0]
    order = rows[torch.argsort(lengths[rows], descending=True, stable=True)]
    order = order[torch.argsort(group[order], stable=True)]
    mine = ranks.share(lengths[order].tolist(), first=zlib.crc32(name.encode()))
    return order[mine].sort().values


def _group_of_row(rewards: Sequence[Sequence[float]]) -> Tensor:
    """Index of each sequence's group, int64 [all]."""
    sizes = torch.tensor([len(group) for group in rewards])
    return torch.arange(len(rewards)).repeat_interleave(sizes)


def _among(group: Tensor, groups: Collection[int]) -> Tensor:
    return torch.isin(group, torch.tensor(sorted(groups), dtype=torch.int64))
