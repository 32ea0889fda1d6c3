"""Log-probabilities of accepted groups under fixed policies: generator, step's start, reference."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peers.learning import objective as objectives
from peers.learning.advantages import Completions, advantages
from peers.learning.batch import AcceptedGroups, Batch, join
from peers.learning.formulas import Tokens
from peers.learning.objective import Totals
from peers.learning.packing import Rows
from peers.learning.past import PastPolicies
from peers.learning.policy import TrainedPolicy
from peers.learning.ranks import Ranks
from peers.learning.settings import LearnerSettings

ENGINE_DIFFERENCE_MAX = 0.1
"""A token is outside if the engine's log-probability differs from the trainer's by more nats."""

Part = Sequence[tuple[AcceptedGroups, Sequence[int]]]
"""One optimiser step's part of a batch: some of the informative groups of each submission."""


def score(
    given: Sequence[AcceptedGroups],
    policy: TrainedPolicy,
    past: PastPolicies,
    settings: LearnerSettings,
    step: int,
) -> None:
    """Fill in the submissions' log-probabilities under fixed policies, where they are missing.

    Each submission has forward passes of its own. So the values depend neither on when they are
    computed nor on the other submissions: they are the same to the last bit ahead of the step, in
    it, and after a crash. `step`: number of the policy held. Where several policies sampled a
    rollout, each scores all of it, as if it had sampled all, and gives μ of its own tokens."""
    # With several optimiser steps, passes after the first are those of weights that have moved.
    one_step = settings.optimiser.optimiser_steps == 1
    own = step if one_step and _publishes_exactly(policy) else -1  # left to the training pass
    given = [each for each in given if each.informative]
    passes = functools.cache(lambda each: policy.passes(each.batch(each.informative)))
    for number in sorted({policy for each in given for policy in each.policies} - {own}):
        some = [each for each in given if number in each.policies and number not in each.scored]
        if some:
            scores = past.score(past.held[number], [passes(each) for each in some])
            for each, values in zip(some, scores, strict=True):
                each.add_log_mu(number, values)
    objective = settings.objective
    some = [each for each in given if each.log_reference is None]
    if some and past.reference and objective.needs_reference:
        scores = past.score(past.reference, [passes(each) for each in some])
        for each, values in zip(some, scores, strict=True):
            each.log_reference = values
    some = [each for each in given if each.log_teacher is None]
    if some and past.teacher and objective.teacher_weight:
        for each, values in zip(some, past.teacher(some), strict=True):
            each.log_teacher = values


def _publishes_exactly(policy: TrainedPolicy) -> bool:
    """Whether a published policy equals the learner bit for bit: its dtype rounds nothing."""
    return policy.published_dtype == torch.float32


@dataclass(frozen=True)
class ScoredBatch:
    """One optimiser step's fixed values: n completion tokens and B completions of this rank."""

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
    """Log-probabilities under the reference, for the KL term and process rewards, fp32 [n]."""
    log_teacher: Tensor | None
    """Log-probabilities under the teacher, fp32 [n]; NaN where it cannot say."""
    reported: Tensor
    """Log-probabilities that the engines reported, else NaN, fp32 [n]."""
    trusted_within: float
    """Largest difference, in nats, between log μ and what the engine reported up to which the
    objective sees the report instead; 0: it never does."""
    advantage: Tensor
    """Advantage of each token, fp32 [n]; in most runs that of its completion."""
    completion: Tensor
    """Index of each token's completion, of B, int64 [n]."""
    environment: Tensor
    """Index of each token's environment, int64 [n]."""

    def tokens(self, rows: Rows, log_pi: Tensor, entropy: Tensor) -> Tokens:
        """The tokens of one pass, as the objective sees them."""
        here = rows.index
        # Kept for later: metrics compare them with what the engines reported.
        log_mu = torch.where(self.on_policy[here], log_pi.detach(), self.log_mu[here])
        self.log_mu[here] = log_mu
        if self.trusted_within > 0:
            reported = self.reported[here.cpu()].to(log_mu.device)
            near = (reported - log_mu).abs() <= self.trusted_within  # NaN, where none was, is not
            log_mu = torch.where(near, reported, log_mu)
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
            log_teacher=None if self.log_teacher is None else self.log_teacher[here],
        )


def assemble(
    part: Part,
    policy: TrainedPolicy,
    settings: LearnerSettings,
    current: int | None = None,
    problems: list[str] | None = None,
) -> ScoredBatch:
    """Make an optimiser step's batch of scored submissions.

    `current`: the learner's number, if no weights move before this batch is trained on. The
    learner's own log-probabilities are then left to the training pass. `problems` is as in
    `peers.learning.advantages.advantages`."""
    device = policy.ranks.device
    objective = settings.objective
    batches = [each.batch(groups) for each, groups in part]
    batch = join(batches)
    some = completions_of(part)
    environment = torch.cat([each.environments(groups) for each, groups in part])
    advantage = advantages(objective, some, settings.completion_tokens_max, problems)[some.here]
    passes = policy.passes(batch)
    learner = current if current is not None and _publishes_exactly(policy) else -1
    on_policy = torch.cat(
        [each.of(groups, each.token_policies) == learner for each, groups in part]
    )
    counts = [each.token_count() for each in batches]
    none = [torch.zeros(count, device=device) for count in counts]
    of_completions = batch.per_token(advantage).split(counts)  # type: ignore[no-untyped-call]

    def joined(name: str, missing: Sequence[Tensor]) -> Tensor:
        """A value of each token, [n]; where a submission has none, `missing`."""
        values = (getattr(each, name) for each, _ in part)
        return torch.cat(
            [
                instead if found is None else each.of(groups, found)
                for (each, groups), found, instead in zip(part, values, missing, strict=True)
            ]
        )

    log_start = None
    if settings.schedule.old == "step_start" and current is None:
        log_start = policy.score(passes)  # not as published, which may be rounded
    group, _ = part[0]
    full = settings.schedule.groups_per_step * len(group.rewards[0])
    return ScoredBatch(
        batch=batch,
        totals=Totals(
            tokens=sum(each.tokens_in(groups) for each, groups in part),
            completions=full / settings.optimiser.optimiser_steps,
            completion_tokens_max=settings.completion_tokens_max,
        ),
        passes=passes,
        log_mu=joined("log_mu", none),
        on_policy=on_policy.to(device),
        old_is_generator=settings.schedule.old == "generation",
        log_start=log_start,
        log_reference=joined("log_reference", none) if objective.needs_reference else None,
        log_teacher=joined("log_teacher", none) if objective.teacher_weight else None,
        reported=joined("reported", none),
        trusted_within=settings.log_difference_max if objective.behaviour == "engine" else 0.0,
        advantage=joined("token_advantage", of_completions).to(device),
        completion=batch.per_token(torch.arange(len(batch))).to(device),
        environment=batch.per_token(environment).to(device),
    )


def completions_of(part: Part) -> Completions:
    """The completions of one optimiser step's part, in the order of its batch."""
    found = [each.completions(groups) for each, groups in part]
    counts = [len(each.reward) for each in found]
    groups = [int(each.group.max()) + 1 for each in found]
    return Completions(
        reward=torch.cat([each.reward for each in found]),
        group=torch.cat([each.group + sum(groups[:index]) for index, each in enumerate(found)]),
        here=torch.cat([each.here + sum(counts[:index]) for index, each in enumerate(found)]),
        length=torch.cat([each.length for each in found]),
        parts={
            name: torch.cat([each.parts.get(name, each.reward * torch.nan) for each in found])
            for name in sorted({name for each in found for name in each.parts})
        },
    )


def compare_engines(batches: Sequence[ScoredBatch], ranks: Ranks) -> dict[str, float]:
    """Metrics of how far the engines' log-probabilities are from the recomputed log μ.

    They are reported only, never used. `engine_log_probability_difference`: the largest difference,
    in nats. `engine_kl`: KL(engine ‖ trainer) per token. `engine_outside_share`: share of tokens
    that differ by more than `ENGINE_DIFFERENCE_MAX`. Empty where engines reported none."""
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
