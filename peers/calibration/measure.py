"""Let a worker generate and a validator recompute, as in a run, without a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from peers.calibration.workers import Generates, HandedIn, Worker
from peers.calibration.workload import Work, Workload
from peers.engines.engine import Engine
from peers.engines.sampling import gumbel_noise
from peers.validator.evidence.submission import Recomputed
from peers.validator.recompute import Completed, Found, recompute
from swarm.wire.manifest import Sampling, Thresholds

# How much choice the tolerated mismatches leave a worker, in bits.
#
# A worker who is never to be evicted must keep its mean of min(margin, 1) at or below
# `honest_margin`, and every margin at or below `margin_max`. The number of texts that do is an
# upper bound on its choice. Following the capacity arguments of arXiv 2511.02620: with m the
# capped margins of all tokens v at a position, and any β > 0,
#
#     number of texts with Σ m ≤ B  ≤  e^(βB) · Π over positions of Σ over v of e^(−βm)
#
# because each such text contributes at least e^(−βB) to the product. The least over a grid of β is
# the bound. It counts choices at the positions of the sampled text; other texts have other
# positions, but alike ones on average.

BETAS = (1.0, 4.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0, 5120.0)


def log_choices(perturbed: Tensor, margin_max: float) -> list[float]:
    """log Σ e^(−βm) summed over positions, for each β, from perturbed logits [n, vocabulary]."""
    margins = perturbed.amax(-1, keepdim=True) - perturbed
    capped = margins.clamp(max=1.0).masked_fill(margins > margin_max, torch.inf)
    return [float(torch.logsumexp(-beta * capped.double(), -1).sum()) for beta in BETAS]


def bits(log_sums: Sequence[float], positions: int, honest_margin: float) -> float:
    """The bound in bits on the choice at so many positions."""
    budget = honest_margin * positions
    nats = min(beta * budget + total for beta, total in zip(BETAS, log_sums, strict=True))
    return nats / math.log(2)


@torch.inference_mode()
def bits_per_token(
    engine: Engine, workload: Workload, submissions: int, thresholds: Thresholds
) -> float:
    """The bound on honest submissions of an engine, per token."""
    totals, positions, sampling = [0.0] * len(BETAS), 0, workload.sampling
    for number in range(submissions):
        work = workload.work(number)
        for row, tokens in enumerate(Generates(engine).submit(work, sampling).completions):
            prompt, count = work.prompts[row], len(tokens)
            sampled = list(range(len(prompt), len(prompt) + count))
            states = engine.prefill([[*prompt, *tokens]], [sampled]).states[0]
            noise = gumbel_noise(
                work.key(),
                torch.tensor(row),
                torch.arange(count),
                engine.capabilities.vocabulary_size,
            )
            perturbed = engine.logits(states) / sampling.temperature + noise
            sums = log_choices(perturbed, thresholds.margin_max)
            totals = [total + more for total, more in zip(totals, sums, strict=True)]
            positions += count
    return bits(totals, positions, thresholds.honest_margin) / positions


_T = TypeVar("_T")


@dataclass(frozen=True)
class Sample:
    """One submission, recomputed."""

    found: Found
    recomputed: Recomputed
    completions: int

    @property
    def tokens(self) -> int:
        return len(self.found.margins)

    @property
    def reward(self) -> float:
        """Mean reward."""
        rewards = [reward for group in self.recomputed.outcomes[0] for reward in group]
        return sum(rewards) / len(rewards)


def sample(
    worker: Worker, validator: Engine, workload: Workload, number: int, name: str = "calibration"
) -> Sample:
    """Let `worker` do the work of submission `number`, and recompute it."""
    work, sampling = workload.work(number, name), workload.sampling
    handed_in = worker.submit(work, sampling)
    return sample_of(find(validator, work, sampling, handed_in), work, sampling, handed_in)


def find(validator: Engine, work: Work, sampling: Sampling, handed_in: HandedIn) -> Found:
    """What a validator finds of a submission."""
    completions = handed_in.completions
    sequences = [
        [*prompt, *tokens] for prompt, tokens in zip(work.prompts, completions, strict=True)
    ]
    given = Completed(
        sequences=sequences,
        sampled=[
            list(range(len(prompt), len(sequence)))
            for prompt, sequence in zip(work.prompts, sequences, strict=True)
        ],
        rows=range(len(sequences)),
        proofs=handed_in.proofs,
    )
    return recompute(validator, given, work.key(), sampling.temperature, Thresholds())


def sample_of(found: Found, work: Work, sampling: Sampling, handed_in: HandedIn) -> Sample:
    """What was found of a submission, with the outcomes of its rollouts."""
    recomputed = Recomputed(
        margins=found.margins,
        errors=found.errors,
        ties=_grouped(list[Sequence[bool]](found.ties), sampling.group_size),
        outcomes=_outcomes(work, handed_in.completions, sampling),
    )
    return Sample(found, recomputed, len(handed_in.completions))


def _outcomes(
    work: Work, completions: list[list[int]], sampling: Sampling
) -> list[list[list[float]]]:
    """Reward, whether the rollout stopped, and its length: [3][groups][group size]."""
    size = sampling.group_size
    rewards = [work.rewards(row, tokens) for row, tokens in enumerate(completions)]
    stopped = [float(tokens[-1] in sampling.stop_ids) for tokens in completions]
    lengths = [float(len(tokens)) for tokens in completions]
    return [_grouped(each, size) for each in (rewards, stopped, lengths)]


def _grouped(rows: list[_T], size: int) -> list[list[_T]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
