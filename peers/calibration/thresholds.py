"""Thresholds from honest samples.

Every honest mean gets a factor of safety: the samples come from the machines at hand, and other
hardware rounds differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from peers.calibration.work import Sample
from peers.proofs.format import chunk_count
from swarm.wire.manifest import Thresholds

SAFETY = 2.0
"""Factor on honest margins, mean and largest."""

ERROR_SAFETY = 1.3
"""Factor on the honest mean error of proofs, which varies less between machines."""

LEAST = Thresholds()
"""Least bounds on margins where engines round at all: the demo's, from two million tokens. A few
thousand tokens of a policy that is mostly certain have too few mismatches to say less."""

LEAST_EXACT = Thresholds(honest_margin=2e-5, margin_max=0.05)
"""The same where no token was a mismatch, as in fp32: until a tie of one in a million comes."""

HONEST_ERROR_MIN = 0.002
"""Least bound on the mean error of proofs: a quarter of the last bit of each bf16 value."""

LOG_DIFFERENCE_MIN = 0.01
"""Least bound on the difference of two engines' log-probabilities, in nats."""

RUN_TOKENS = 1e9
"""Tokens among which no honest margin should exceed the bound on a single one."""

TAIL_MIN = 10
"""Largest mismatches that are extrapolated at least, if there are so many."""

DEVIATIONS = 8
"""Standard deviations kept between honest chunks and the limits on a single proof."""


def propose(honest: Sequence[Sequence[Sample]], base: Thresholds | None = None) -> Thresholds:
    """Thresholds that no honest work comes near; `honest` has one list per pair of engines.

    A few thousand tokens per pair are enough for means, whose errors are counted between rollouts,
    since the tokens of one are alike. They say less about the largest margin that a run will see,
    so that is extrapolated.
    """
    chunks = [chunk for pair in honest for each in pair for chunk in each.found.chunks]
    exponents = [chunk.exponent_matches for chunk in chunks]
    means = [chunk.mantissa_mean for chunk in chunks]
    margin = max(
        _margin_bound([part for each in pair for part in _margins(each)]) for pair in honest
    )
    error = max(_bound([part for each in pair for part in _errors(each)]) for pair in honest)
    largest = max(_largest(np.concatenate([each.found.margins for each in p])) for p in honest)
    apart = max(_largest(each.differences) for pair in honest for each in pair)
    tokens = sum(each.tokens for pair in honest for each in pair)
    least = LEAST if largest else LEAST_EXACT
    lowest = min(min(exponents), float(np.mean(exponents) - DEVIATIONS * np.std(exponents)))
    return replace(
        base or Thresholds(),
        proof_exponents_min=max(0, math.floor(lowest) - 2),
        proof_mantissa_mean_max=_digits(
            max(max(means), float(np.mean(means) + DEVIATIONS * np.std(means))) * ERROR_SAFETY + 1
        ),
        proof_mantissa_median_max=max(chunk.mantissa_median for chunk in chunks) + 2,
        honest_margin=_digits(max(least.honest_margin, SAFETY * margin)),
        margin_max=_digits(max(least.margin_max, SAFETY * largest)),
        honest_proof_error=_digits(max(HONEST_ERROR_MIN, ERROR_SAFETY * error)),
        honest_outliers=_digits(max(1e-6, 3 / tokens)),
        log_difference_max=_digits(min(20.0, max(LOG_DIFFERENCE_MIN, SAFETY * apart))),
        measured_tokens=tokens,
    )


Scores = np.ndarray[tuple[int], np.dtype[np.float64]]


def _margins(sample: Sample) -> list[Scores]:
    """The margins of each rollout, as they are pooled."""
    ends = np.cumsum(sample.lengths)[:-1]
    return np.split(np.minimum(sample.found.margins, 1.0), ends)


def _errors(sample: Sample) -> list[Scores]:
    """The errors of each rollout's proofs."""
    ends = np.cumsum([chunk_count(length) for length in sample.lengths])[:-1]
    return np.split(sample.found.errors, ends)


def _bound(parts: Sequence[Scores]) -> float:
    """Mean of all scores plus three standard errors, counted between rollouts."""
    sums = np.array([part.sum() for part in parts])
    counts = np.array([len(part) for part in parts])
    mean = sums.sum() / counts.sum()
    error = np.sqrt(np.square(sums - mean * counts).sum()) / counts.sum()
    return float(mean + 3 * error)


def _margin_bound(parts: Sequence[Scores]) -> float:
    """The same of margins, or as if three more had been as large as the largest, if that is more.

    So few mismatches have no spread: of none, up to three are expected (95 %).
    """
    mean = sum(float(part.sum()) for part in parts) / sum(map(len, parts))
    largest = max(float(part.max(initial=0.0)) for part in parts)
    return max(_bound(parts), mean + 3 * largest / sum(map(len, parts)))


def _largest(margins: Scores) -> float:
    """The largest margin among `RUN_TOKENS` tokens, if large margins fall off exponentially.

    The mean excess over the largest tenth of the mismatches, plus three standard errors, is their
    rate. There are few of them, so the largest one alone says little: among 10,000 honest tokens
    it was 0.37, among 3,000 others 0.62.
    """
    found = np.sort(margins[margins > 0])
    if not len(found):
        return 0.0
    count = min(len(found), max(TAIL_MIN, len(found) // 10))
    least = float(found[-count - 1]) if count < len(found) else 0.0
    rate = float((found[-count:] - least).mean()) * (1 + 3 / math.sqrt(count))
    return max(float(found[-1]), least + rate * math.log(RUN_TOKENS * count / len(margins)))


def _digits(value: float) -> float:
    """Two significant digits, rounded up."""
    unit: float = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.2g}")
