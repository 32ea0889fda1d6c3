"""How much choice the tolerated mismatches leave a worker, in bits.

A worker who is never to be evicted must keep its mean of min(margin, 1) at or below
`honest_margin`, and every margin at or below `margin_max`. The number of texts that do is an upper
bound on its choice. Following the capacity arguments of arXiv 2511.02620: with m the capped margins
of all tokens v at a position, and any β > 0,

    number of texts with Σ m ≤ B  ≤  e^(βB) · Π over positions of Σ over v of e^(−βm)

because each such text contributes at least e^(−βB) to the product. The least over a grid of β is
the bound. It counts choices at the positions of the sampled text; other texts have other positions,
but alike ones on average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from peers.calibration.workers import Generates
from peers.calibration.workload import Workload
from peers.engines.engine import Engine
from peers.engines.sampling import gumbel_noise
from swarm.wire.manifest import Thresholds

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
