"""The losses of fine-tuning: how each token's log-probability is weighed.

The gradient of each loss is that of −Σ weight · log π over the tokens that the model wrote, with
weights that are constants. A batch may therefore take any number of forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from peers.learning.batch import Batch
from swarm.jobs.offline import Validated
from swarm.rollouts.rollout import Rollout


@dataclass(eq=False)
class Example:
    """Episodes that are learned together: one, or a chosen one and a rejected one."""

    rollouts: Sequence[Rollout]
    reference: float = 0.0
    """Of a pair: log-probability of the chosen answer less that of the rejected one, in the policy
    that the tuning began with."""


Score = Callable[[Sequence[Example]], Tensor]
"""Log-probabilities of some examples' tokens, fp32 [n], without a gradient."""


class Loss(Protocol):
    """What is learned of examples."""

    def weigh(
        self, examples: Sequence[Example], batch: Batch, score: Score
    ) -> tuple[Tensor, float | None]:
        """Each token's weight, fp32 [n], and the loss; None: it is −Σ weight · log π itself."""
        ...

    def judge(self, examples: Sequence[Example], batch: Batch, score: Score) -> Validated:
        """Measure the policy on examples held back."""
        ...


class Answers:
    """Mean negative log-probability of the model's tokens, stop tokens included."""

    def weigh(
        self, examples: Sequence[Example], batch: Batch, score: Score
    ) -> tuple[Tensor, float | None]:
        count = batch.token_count()
        return torch.full((count,), 1 / count), None

    def judge(self, examples: Sequence[Example], batch: Batch, score: Score) -> Validated:
        scores = score(examples)
        exact = _per_episode(scores, batch).exp().mean()
        return Validated(loss=-float(scores.mean()), exact=float(exact))


class Preferences:
    """DPO (Rafailov et al. 2023, 2305.18290): −log σ(β · margin), mean over the pairs.

    The margin is how much more log-probability the chosen answer gained over the reference than
    the rejected one. `answer_weight` adds the mean negative log-probability of the chosen answers,
    which keeps them from becoming less likely together with the rejected ones (Pang et al. 2024,
    2404.19733).
    """

    def __init__(self, beta: float, answer_weight: float) -> None:
        self._beta, self._answer_weight = beta, answer_weight

    def refer(self, examples: Sequence[Example], batch: int, score: Score) -> None:
        """Compute the reference of all pairs, once, `batch` pairs at a time."""
        for start in range(0, len(examples), batch):
            some = examples[start : start + batch]
            lengths = torch.tensor([len(r.model_tokens) for each in some for r in each.rollouts])
            sums = _sums(score(some), lengths)
            for example, difference in zip(some, (sums[0::2] - sums[1::2]).tolist(), strict=True):
                example.reference = difference

    def weigh(
        self, examples: Sequence[Example], batch: Batch, score: Score
    ) -> tuple[Tensor, float | None]:
        scores = score(examples)
        margin = self._margins(scores, examples, batch)
        pull = self._beta * torch.sigmoid(-self._beta * margin) / len(examples)
        signed = torch.stack([pull, -pull], dim=1).flatten()
        weights = batch.per_token(signed)
        chosen = batch.per_token(torch.tensor([1.0, 0.0]).repeat(len(examples)))
        share = chosen * self._answer_weight / chosen.sum()
        value = -logsigmoid(self._beta * margin).mean() - (share * scores).sum()
        return weights + share, float(value)

    def judge(self, examples: Sequence[Example], batch: Batch, score: Score) -> Validated:
        margin = self._margins(score(examples), examples, batch)
        return Validated(
            loss=-float(logsigmoid(self._beta * margin).mean()),
            preferred=float((margin > 0).float().mean()),
            margin=float(margin.mean()),
        )

    def _margins(self, scores: Tensor, examples: Sequence[Example], batch: Batch) -> Tensor:
        sums = _per_episode(scores, batch)
        return sums[0::2] - sums[1::2] - torch.tensor([each.reference for each in examples])


def _per_episode(scores: Tensor, batch: Batch) -> Tensor:
    return _sums(scores, batch.completion_lengths)


def _sums(scores: Tensor, lengths: Tensor) -> Tensor:
    """The sum of each episode's scores [n], by their numbers of tokens."""
    return torch.stack([each.sum() for each in torch.split(scores, lengths.tolist())])
