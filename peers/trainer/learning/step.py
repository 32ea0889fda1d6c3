"""The GRPO step: score under the generating policies, then loss, backward, clip, step.

One rollout step takes one or more optimiser steps, each on its part of the groups. The
log-probabilities under fixed policies (`scoring.py`) are computed before any weight moves.
`objective.py` has the losses, `packing.py` the layout of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peers.trainer.learning import objective as objectives
from peers.trainer.learning.gradients import clip_gradients
from peers.trainer.learning.past import PastPolicies
from peers.trainer.learning.policy import TrainedPolicy
from peers.trainer.learning.scoring import Part, ScoredBatch, assemble, compare_engines, score
from peers.trainer.learning.settings import LearnerSettings
from peers.trainer.learning.work import NO_WORK, training_work
from swarm.world.progress import report


@dataclass(frozen=True)
class GrpoStep:
    """One rollout step of a policy under these settings."""

    policy: TrainedPolicy
    past: PastPolicies
    settings: LearnerSettings
    step: int
    """Number of the rollout step, and of the policy before it."""

    def take(self, parts: Sequence[Part]) -> dict[str, float]:
        """Take one optimiser step per part; return the mean metrics, and sums of the work done."""
        first = self.step * self.settings.optimiser.optimiser_steps
        given = list(dict.fromkeys(each for part in parts for each, _ in part))
        score(given, self.policy, self.past, self.settings, self.step)
        batches = [
            assemble(part, self.policy, self.settings, current=None if index else self.step)
            for index, part in enumerate(parts)
        ]
        figures = [self._optimise(batch, first + index) for index, batch in enumerate(batches)]
        if not figures:
            return {}
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
        }

    def _optimise(self, batch: ScoredBatch, optimiser_step: int) -> dict[str, float]:
        """Take one optimiser step on one batch; skip it if loss or gradient is not finite.

        The figures stay on the device until all passes are done: reading one in a pass would make
        the device wait for the host.
        """
        goal, ranks = self.settings.objective, self.policy.ranks
        optimiser = self.policy.optimiser
        sums: dict[str, Tensor] = {}
        optimiser.zero_grad()
        scorer = self.policy.scorer
        for rows, experts in zip(batch.passes, batch.experts, strict=True):  # k tokens each
            report()
            with scorer.routing.replaying(experts, ranks.device):
                log_pi, entropy = scorer(  # fp32 [k] each
                    rows, entropy_gradient=bool(goal.entropy_coefficient)
                )
                tokens = batch.tokens(rows, log_pi, entropy)
                loss, metrics = objectives.loss(goal, tokens, batch.totals)
                # Each rank's loss is its share of the batch's; FSDP averages the gradients.
                (loss * ranks.parts).backward()  # type: ignore[no-untyped-call]
            for name, value in metrics.items():
                sums[name] = sums[name] + value if name in sums else value

        norm_max = self.settings.optimiser.gradient_norm_max
        parameters = self.policy.trained().values()
        on_device = clip_gradients(parameters, norm_max)
        names = sorted(sums)
        on_device = torch.stack([*(sums[name] for name in names), on_device.to(ranks.device)])
        *mine, norm = on_device.tolist()
        figures = dict(zip(names, ranks.sum(mine), strict=True))
        rate = self.settings.learning_rate(optimiser_step)
        finite = math.isfinite(norm) and math.isfinite(figures["loss"])
        if finite:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
        return {
            **figures,
            "gradient_norm": norm,
            "learning_rate": rate,
            "skipped": float(not finite),
        }
