"""Log-probabilities of a batch under fixed policies: generator, step's start and reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peers.trainer.learning import objective as objectives
from peers.trainer.learning.batch import Batch, Group, make_batch
from peers.trainer.learning.objective import Tokens, Totals
from peers.trainer.learning.packing import Rows
from peers.trainer.learning.past import PastPolicies
from peers.trainer.learning.policy import TrainedPolicy
from peers.trainer.learning.ranks import Ranks
from peers.trainer.learning.settings import LearnerSettings

ENGINE_DIFFERENCE_MAX = 0.1
"""A token counts as outside if the engine's log-probability differs from the trainer's by more
than this, in nats."""


@dataclass(frozen=True)
class ScoredBatch:
    """One optimiser step's batch, with all values that stay fixed while the optimiser steps.

    n is the number of completion tokens and B of completions on this rank.
    """

    batch: Batch
    """This rank's sequences."""
    totals: Totals
    """Totals over all ranks."""
    passes: list[Rows]
    log_mu: Tensor
    """log μ of each token, under the policy that generated it, fp32 [n]. The trainer computes it
    with its own copies of those policies, since a worker may lie. Undefined where `on_policy`,
    until `tokens` fills it in."""
    on_policy: Tensor
    """Whether each token's generating policy equals the learner bit for bit, bool [n]. The training
    pass computes the same numbers for such tokens, so they need no pass of their own."""
    old_is_generator: bool
    """Whether the ratio's denominator is μ, as with `schedule.old = "generation"`."""
    log_start: Tensor | None
    """Log-probabilities, fp32 [n], under the weights at the start of the rollout step, where they
    are the denominator. None: the denominator is μ, or the weights have not moved since, so that
    the training pass gives the same numbers."""
    log_reference: Tensor | None
    """Log-probabilities under the reference, for the KL term, fp32 [n]."""
    reported: Tensor
    """Log-probabilities that the engines reported, else NaN, fp32 [n]; never trained on."""
    advantage: Tensor
    """Advantage of each token's completion, fp32 [n]."""
    completion: Tensor
    """Index of each token's completion, of B, int64 [n]."""

    def tokens(self, rows: Rows, log_pi: Tensor, entropy: Tensor) -> Tokens:
        """The tokens of one pass, as the objective sees them."""
        here = rows.index
        log_mu = torch.where(self.on_policy[here], log_pi.detach(), self.log_mu[here])
        self.log_mu[here] = log_mu
        if self.old_is_generator:
            log_old = log_mu
        else:
            log_old = log_pi.detach() if self.log_start is None else self.log_start[here]
        return Tokens(
            log_pi=log_pi,
            log_old=log_old,
            log_mu=log_mu,
            advantage=self.advantage[here],
            entropy=entropy,
            completion=self.completion[here],
            log_reference=None if self.log_reference is None else self.log_reference[here],
            completions=len(self.batch),
        )


def score(
    groups: list[Group],
    policy: TrainedPolicy,
    past: PastPolicies,
    settings: LearnerSettings,
    *,
    current: int | None = None,
) -> ScoredBatch:
    """Make the batch of `groups`, and compute its log-probabilities under fixed policies.

    `current`: the learner's number, if no weights move before this batch is trained on. The
    learner's own log-probabilities are then left to the training pass.
    """
    ranks = policy.ranks
    everything = make_batch(groups, settings.objective)
    mine = ranks.share(everything.lengths)
    batch = everything.rows(mine)
    passes = policy.passes(batch)
    log_start = None
    log_mu, on_policy = _score_generators(groups, batch, policy, past, current)
    if settings.schedule.old == "step_start" and current is None:
        log_start = policy.score(passes)  # not as published, which may be rounded
    log_reference = None
    if past.reference and settings.objective.kl_coefficient:
        log_reference = past.score(past.reference, passes)
    taken = torch.zeros(len(everything), dtype=torch.bool)
    taken[mine] = True
    (tokens,) = ranks.sum([batch.token_count()])
    full = settings.schedule.groups_per_step * len(groups[0].rollouts)
    return ScoredBatch(
        batch=batch,
        totals=Totals(
            tokens=int(tokens),
            completions=full / settings.optimiser.optimiser_steps,
            completion_tokens_max=settings.completion_tokens_max,
        ),
        passes=passes,
        log_mu=log_mu,
        on_policy=on_policy,
        old_is_generator=settings.schedule.old == "generation",
        log_start=log_start,
        log_reference=log_reference,
        reported=_reported(groups)[everything.per_token(taken)],
        advantage=batch.per_token(batch.advantage).to(ranks.device),
        completion=batch.per_token(torch.arange(len(batch))).to(ranks.device),
    )


def _score_generators(
    groups: list[Group],
    batch: Batch,
    policy: TrainedPolicy,
    past: PastPolicies,
    current: int | None,
) -> tuple[Tensor, Tensor]:
    """(log μ, on-policy) of each token; log μ is left 0 for on-policy tokens."""
    device = policy.ranks.device
    exact = policy.published_dtype == torch.float32  # then publishing rounds nothing
    learner = current if current is not None and exact else -1
    policy_of_token = batch.per_token(batch.policy)  # stays on the CPU, where masks cost no wait
    log_mu = torch.zeros(batch.token_count(), device=device)
    for number in sorted({group.policy for group in groups} - {learner}):
        part = batch.rows(batch.policy == number)
        here = (policy_of_token == number).nonzero()[:, 0].to(device)
        log_mu[here] = past.score(past.held[number], policy.passes(part))
    return log_mu, (policy_of_token == learner).to(device)


def compare_engines(batches: Sequence[ScoredBatch], ranks: Ranks) -> dict[str, float]:
    """Metrics of how far the engines' log-probabilities are from the recomputed log μ.

    They are reported only, never used. `engine_log_probability_difference`: the largest difference,
    in nats. `engine_kl`: KL(engine ‖ trainer) per token. `engine_outside_share`: share of tokens
    that differ by more than `ENGINE_DIFFERENCE_MAX`. Empty where engines reported none.
    """
    ours = torch.cat([batch.log_mu.cpu() for batch in batches])
    theirs = torch.cat([batch.reported for batch in batches])
    ours, theirs = ours[~theirs.isnan()], theirs[~theirs.isnan()]
    difference = (ours - theirs).abs()
    kl = float(objectives.k3(ours, theirs).sum())
    outside = float((difference > ENGINE_DIFFERENCE_MAX).sum())
    count, kl, outside = ranks.sum([len(ours), kl, outside])
    (largest,) = ranks.max([float(difference.max()) if len(difference) else 0.0])
    if not count:
        return {}
    return {
        "engine_log_probability_difference": largest,
        "engine_kl": kl / count,
        "engine_outside_share": outside / count,
    }


def _reported(groups: Sequence[Group]) -> Tensor:
    """The engines' own log-probabilities, fp32 [n]; NaN for rollouts without them."""
    values: list[float] = []
    for group in groups:
        for rollout in group.rollouts:
            found = rollout.log_probabilities
            values += [math.nan] * len(rollout.model_tokens) if found is None else found
    return torch.tensor(values)
