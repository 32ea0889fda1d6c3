"""The GRPO step: score under the generating policies, then loss, backward, clip, step.

One rollout step takes one or more optimiser steps, each on its part of the groups. The
log-probabilities under fixed policies (`scoring.py`) are computed before any weight moves.
`objective.py` has the losses, `packing.py` the layout of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peers.learning import objective as objectives
from peers.learning.descent import descend
from peers.learning.implicit import ProcessModel
from peers.learning.past import PastPolicies
from peers.learning.policy import TrainedPolicy
from peers.learning.scoring import Part, ScoredBatch, assemble, compare_engines, score
from peers.learning.settings import LearnerSettings
from peers.learning.work import NO_WORK, by_environment, training_work
from swarm.world.progress import report


@dataclass(frozen=True)
class GrpoStep:
    """One rollout step of a policy under these settings."""

    policy: TrainedPolicy
    past: PastPolicies
    settings: LearnerSettings
    step: int
    """Number of the rollout step, and of the policy before it."""
    process: ProcessModel | None = None
    """The model of process rewards, if the objective has them."""
    trained: list[Tensor] = field(default_factory=list)
    """Gets what `stability` needs of each pass."""
    problems: list[str] = field(default_factory=list)
    """Gets a sentence for each failing formula of another package: its step is skipped."""

    def take(self, parts: Sequence[Part]) -> dict[str, float]:
        """Take one optimiser step per part; return the mean metrics, and sums of the work done."""
        first = self.step * self.settings.optimiser.optimiser_steps
        given = list(dict.fromkeys(each for part in parts for each, _ in part))
        score(given, self.policy, self.past, self.settings, self.step)
        batches = [
            assemble(part, self.policy, self.settings, None if index else self.step, self.problems)
            for index, part in enumerate(parts)
        ]
        if not batches:
            return {}
        judged: dict[str, float] = {}
        if self.process is not None:
            self.policy.optimiser.zero_grad()  # their memory holds the other model's meanwhile
            batches, judged = self.process.judge(parts, batches)
        figures = [self._optimise(batch, first + index) for index, batch in enumerate(batches)]
        means = {name: sum(each[name] / len(figures) for each in figures) for name in figures[0]}
        work = [
            training_work(self.policy.model, batch.batch)
            for batch, each in zip(batches, figures, strict=True)
            if not each["skipped"]
        ]
        done = self.policy.ranks.sum([sum(each[name] for each in work) for name in NO_WORK])
        return {
            **objectives.describe(means),
            **dict(zip(NO_WORK, done, strict=True)),
            **compare_engines(batches, self.policy.ranks),
            **judged,
        }

    def _optimise(self, batch: ScoredBatch, optimiser_step: int) -> dict[str, float]:
        """Take one optimiser step on one batch; skip it if loss or gradient is not finite."""
        goal, ranks = self.settings.objective, self.policy.ranks
        sums: dict[str, Tensor] = {}
        self.policy.optimiser.zero_grad()
        scorer = self.policy.scorer
        for rows in batch.passes:  # k tokens each
            report()
            log_pi, entropy = scorer(  # fp32 [k] each
                rows, entropy_gradient=bool(goal.entropy_coefficient)
            )
            tokens = batch.tokens(rows, log_pi, entropy)
            loss, metrics = objectives.loss(goal, tokens, batch.totals, self.problems)
            kl = objectives.k3(tokens.log_mu, tokens.log_pi)
            columns = (torch.ones_like(kl), entropy, kl)
            self.trained.append(by_environment(batch.environment[rows.index], columns))
            # Each rank's loss is its share of the batch's; FSDP averages the gradients.
            (loss * ranks.parts).backward()  # type: ignore[no-untyped-call]
            for name, value in metrics.items():
                sums[name] = sums[name] + value if name in sums else value

        rate = self.settings.learning_rate(optimiser_step)
        return descend(self.policy, sums, self.settings.optimiser.gradient_norm_max, rate)
