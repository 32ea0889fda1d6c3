"""Implicit process rewards: a second model, taught by outcomes alone, rewards every token.

PRIME (arXiv 2502.01456, algorithm 1). The model φ begins with the base's weights. It learns from
whole completions: log-odds of being right = β · Σ_t q_t, with q_t = log π_φ(y_t) − log π_ref(y_t).
After that r_t = β · q_t is the reward of token t, though no token was ever labelled. Each source of
rewards has a leave-one-out baseline of its own (eq. 5, γ = 1 as in the published code), and the
advantages of both are added. φ learns from a step's rollouts before it rewards their tokens, the
"double forward" of the published code.

Deviations: rewards are not rescaled over the batch and advantages not whitened, as in the paper's
equations and unlike its code. φ follows no schedule; its rate is constant, as published."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
from torch import Tensor

from peers.learning.advantages import Completions
from peers.learning.descent import descend
from peers.learning.policy import TrainedPolicy, blank_model
from peers.learning.ranks import Ranks
from peers.learning.scoring import Part, ScoredBatch, completions_of
from peers.learning.settings import LearnerSettings
from swarm.world.progress import report

GRADIENT_NORM_MAX = 1.0
"""Larger gradients of φ are scaled down to this norm, as in the published code."""

PREFIX = "process."
"""Begins the names of φ's tensors in a training state."""


class ProcessModel:
    """The model φ with its optimiser, sharded like the policy; it is never published."""

    def __init__(self, base: Path, settings: LearnerSettings, ranks: Ranks) -> None:
        """Begin with the weights in the Hugging Face folder `base`; raises `UserError`."""
        self.policy = TrainedPolicy(blank_model(base, settings, ranks), base, settings, ranks)
        self._base = base
        self._numbers = settings.objective.process

    def follow(self, settings: LearnerSettings) -> None:
        """Use another version of the run's numbers from now on."""
        self.policy.follow(settings.optimiser)
        self._numbers = settings.objective.process

    def judge(
        self, parts: Sequence[Part], batches: Sequence[ScoredBatch]
    ) -> tuple[list[ScoredBatch], dict[str, float]]:
        """Learn from a rollout step's batches, one optimiser step on each, then reward their
        tokens; returns the batches with the advantages added, and figures.

        A step of φ whose loss or gradient is not finite is skipped, like the policy's."""
        completions = [completions_of(part) for part in parts]
        pairs = list(zip(batches, completions, strict=True))
        figures = [self._learn(*pair) for pair in pairs]
        self.policy.optimiser.zero_grad()  # their memory is the policy's from here on
        added = []
        for index, (batch, some) in enumerate(pairs):
            rewards = self._numbers.beta * (self.policy.score(batch.passes) - _reference(batch))
            lengths = batch.batch.completion_lengths
            advantage = process_advantages(rewards, lengths, some, self.policy.ranks)
            figures[index] |= self._describe(rewards, advantage, batch, some)
            advantage = batch.advantage + self._numbers.weight * advantage
            added.append(dataclasses.replace(batch, advantage=advantage))
        shown = {
            f"process_{name}": sum(each[name] for each in figures) / len(figures)
            for name in figures[0]
        }
        return added, shown

    def _learn(self, batch: ScoredBatch, some: Completions) -> dict[str, float]:
        """Take an optimiser step on the cross-entropy of a batch's completions."""
        ranks, scorer, count = self.policy.ranks, self.policy.scorer, len(some.reward)
        right = some.reward[some.here] >= self._numbers.outcome_min  # bool [B]
        right = right.float().to(ranks.device)
        reference = _reference(batch)
        sums: dict[str, Tensor] = {}
        self.policy.optimiser.zero_grad()
        for rows in batch.passes:  # k tokens each, of whole completions
            report()
            owner = batch.completion[rows.index]
            log_ratio = scorer(rows, entropy=False)[0] - reference[rows.index]
            none = log_ratio.new_zeros(len(right))
            log_odds = self._numbers.beta * none.index_add(0, owner, log_ratio)
            here = none.index_fill(0, owner, 1.0)
            loss = F.binary_cross_entropy_with_logits(log_odds, right, here, reduction="sum")
            # Each rank's loss is its share of the batch's; FSDP averages the gradients.
            (loss / count * ranks.parts).backward()  # type: ignore[no-untyped-call]
            found = {
                "loss": loss.detach() / count,
                "accuracy": (here * ((log_odds > 0) == (right > 0))).sum() / count,
            }
            for name, value in found.items():
                sums[name] = sums[name] + value if name in sums else value
        return descend(self.policy, sums, GRADIENT_NORM_MAX, self._numbers.learning_rate)

    def _describe(
        self, rewards: Tensor, advantage: Tensor, batch: ScoredBatch, some: Completions
    ) -> dict[str, float]:
        """The mean reward of a completion, and the mean size of a token's advantage."""
        mine = torch.stack([rewards.sum(), advantage.abs().sum()]).tolist()
        reward, size = self.policy.ranks.sum(mine)
        return {"reward": reward / len(some.reward), "advantage": size / batch.totals.tokens}

    # --- training state ----------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Weights and optimiser by their names in a training state; a load fills them in place."""
        return {PREFIX + name: value for name, value in self.policy.state().items()}

    def expects(self, names: Collection[str], folder: Path) -> bool:
        """Create what a load of the training state `folder` is to fill. False if the state has no
        second model, since the run had none then: it begins again.

        `names`: those of its tensors. Raises `UserError` if the optimiser was another one."""
        mine = {name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)}
        self.policy.optimiser.state.clear()
        if not mine:
            self.policy.assign(self.policy.read_weights(self._base))
        if any(name.startswith("optimiser.") for name in mine):
            self.policy.make_optimiser_state(mine, folder)
        return bool(mine)


def process_advantages(rewards: Tensor, lengths: Tensor, some: Completions, ranks: Ranks) -> Tensor:
    """Rewards of this rank's tokens, fp32 [n] → their advantages, fp32 [n] (eq. 5, γ = 1).

    A_t = Σ_{s ≥ t} (r_s − b), with b the mean, over the group's other completions, of a
    completion's mean reward. `lengths`: tokens of each of this rank's completions, int64 [B]."""
    lengths = lengths.to(rewards.device)
    values = rewards.double()
    completion = torch.arange(len(lengths), device=rewards.device).repeat_interleave(lengths)
    sums = values.new_zeros(len(lengths)).index_add(0, completion, values)
    means = torch.zeros(len(some.reward), dtype=torch.float64)
    means[some.here] = (sums / lengths).cpu()
    means = torch.tensor(ranks.sum(means.tolist()), dtype=torch.float64)
    baseline = (some.mean(means) * some.size - means) / (some.size - 1)  # [N]
    centred = values - baseline[some.here].to(rewards.device)[completion]
    before = centred.cumsum(0)
    ends = before[lengths.cumsum(0) - 1]
    return (ends[completion] - before + centred).float()


def _reference(batch: ScoredBatch) -> Tensor:
    if batch.log_reference is None:
        raise ValueError("process rewards need reference log-probabilities")
    return batch.log_reference
