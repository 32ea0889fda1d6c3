"""Figures of an evaluation: pass@k, means, and their confidence intervals. Imports no torch.

pass@k is the probability that at least one of k samples solves a task. Of n samples with c right
ones, 1 − C(n − c, k) / C(n, k) estimates it without bias (Chen et al. 2021, arXiv 2107.03374).

Samples of one task are not independent, so an interval is over tasks (Miller 2024, arXiv
2411.00640). It is Wilson's score interval (Wilson 1927) where each task counts as wholly right or
wholly wrong, and else the percentile bootstrap over tasks (Efron and Tibshirani 1993), which has no
width where all tasks have the same value: then it is Wilson's too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Z_95 = 1.959963984540054
"""Standard normal quantile of a two-sided interval of 95 %."""

RESAMPLES = 2000
"""Bootstrap samples: the ends of a 95 % interval then vary by about 2 % of its width."""

RESAMPLED_VALUES_MAX = 1 << 22
"""Most values drawn at a time, so that a large evaluation takes no more than 64 MiB."""

SEED = 2

Method = Literal["wilson", "bootstrap", "none"]


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    method: Method
    """How the interval was computed; none: one value gives no interval."""


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Estimate pass@k without bias from `solved` of `samples`; raises `ValueError` for k beyond."""
    if not 1 <= k <= samples or not 0 <= solved <= samples:
        raise ValueError(f"pass@{k} of {solved} in {samples} samples")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def wilson(share: float, trials: int) -> tuple[float, float]:
    """Wilson's score interval of a share among independent trials."""
    spread = Z_95 * math.sqrt(share * (1 - share) / trials + (Z_95 / trials / 2) ** 2)
    middle = share + Z_95**2 / trials / 2
    scale = 1 + Z_95**2 / trials
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean; equal values give equal intervals everywhere."""
    given = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(SEED)
    at_once = max(1, RESAMPLED_VALUES_MAX // len(given))
    means: list[np.ndarray] = []
    for start in range(0, RESAMPLES, at_once):
        shape = (min(at_once, RESAMPLES - start), len(given))
        means.append(given[random.integers(len(given), size=shape)].mean(axis=1))
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value per task, with its interval."""
    mean = math.fsum(values) / len(values)
    are_shares = min(values) >= 0 and max(values) <= 1
    if are_shares and (set(values) <= {0.0, 1.0} or len(set(values)) == 1):
        return Estimate(mean, *wilson(mean, len(values)), "wilson")
    if len(values) == 1:
        return Estimate(mean, mean, mean, "none")
    return Estimate(mean, *bootstrap(values), "bootstrap")


def difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """The mean of `values` minus `others`, task by task, with its paired bootstrap interval."""
    gains = [value - other for value, other in zip(values, others, strict=True)]
    mean = math.fsum(gains) / len(gains)
    if len(gains) == 1:
        return Estimate(mean, mean, mean, "none")
    return Estimate(mean, *bootstrap(gains), "bootstrap")
