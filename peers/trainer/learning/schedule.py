"""The learning rate of an optimiser step: warm-up, then constant, linear, cosine or WSD.

It depends on the step alone, so a skipped step shifts nothing and a resumed run agrees.
"""

from __future__ import annotations

import math

from swarm.messages import Optimiser


def learning_rate(optimiser: Optimiser, optimiser_steps: int, step: int) -> float:
    """The rate of optimiser step `step` (from 0) of `optimiser_steps` in the whole run.

    It rises linearly over `warmup_steps`. Every decay ends at `final_learning_rate_share` of the
    rate and stays there. Cosine: Loshchilov & Hutter 2017 (1608.03983), without restarts. WSD
    (warm-up, stable, decay): Hu et al. 2024 (2404.06395), with the linear decay of Hägele et al.
    2024 (2405.18392).
    """
    if step < optimiser.warmup_steps:
        return optimiser.learning_rate * (step + 1) / optimiser.warmup_steps
    begin = optimiser.warmup_steps
    if optimiser.learning_rate_schedule == "wsd":
        begin = max(begin, optimiser_steps - math.ceil(optimiser.decay_share * optimiser_steps))
    done = min(1.0, max(0, step - begin) / max(1, optimiser_steps - begin))  # of the decay
    lost = {
        "constant": 0.0,
        "cosine": (1 - math.cos(math.pi * done)) / 2,
        "linear": done,
        "wsd": done,
    }[optimiser.learning_rate_schedule]
    return optimiser.learning_rate * (1 - (1 - optimiser.final_learning_rate_share) * lost)
