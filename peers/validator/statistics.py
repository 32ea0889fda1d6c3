"""Statistics across submissions: honest chance, workers' records, copies, speed.

None of these figures proves a fault. Each either refuses a submission or accumulates until honest
chance no longer explains it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import blake3

from swarm.messages import Thresholds
from swarm.rollouts.seeds import digest

DUPLICATE_GROUPS_MAX = 1 << 17
"""Groups remembered to recognise copies: about 30 MB, far more groups than `max_staleness`
admits."""


def binomial_tail(mismatches: int, positions: int, rate: float) -> float:
    """P(X ≥ mismatches) for X ~ Binomial(positions, rate), summed exactly in logarithms.

    Raises `ValueError` unless 0 ≤ mismatches ≤ positions and 0 < rate < 1.
    """
    if not 0 <= mismatches <= positions or not 0 < rate < 1:
        raise ValueError(f"no tail of {mismatches} in {positions} at rate {rate}")
    if mismatches <= positions * rate:
        # Below the mean, terms decrease downwards, so sum the complement in that direction.
        return max(0.0, 1.0 - _sum_from(mismatches - 1, positions, rate, step=-1))
    return min(1.0, _sum_from(mismatches, positions, rate, step=1))


def _sum_from(start: int, positions: int, rate: float, step: int) -> float:
    """Σ P(X = i) for i = start, start + step, …, away from the mean, until terms are negligible."""
    if not 0 <= start <= positions:
        return 0.0
    log_first = (
        math.lgamma(positions + 1)
        - math.lgamma(start + 1)
        - math.lgamma(positions - start + 1)
        + start * math.log(rate)
        + (positions - start) * math.log1p(-rate)
    )
    odds = rate / (1 - rate)
    term = total = 1.0  # in units of the first term
    i = start
    while term > total * 1e-17:
        term *= (positions - i) / (i + 1) * odds if step > 0 else i / (positions - i + 1) / odds
        total += term
        i += step
    return math.exp(log_first + math.log(total))


@dataclass
class WorkerRecord:
    """One worker's checked work, pooled over its submissions."""

    accepted: int = 0
    """Accepted submissions."""
    positions: int = 0
    """Recomputed tokens where the policy left a choice (p_max < 0.99)."""
    mismatches: int = 0
    """Tokens among `positions` that differ from the recomputed sample."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    """The thresholds in force when they were recomputed."""

    def observe(self, mismatches: int, positions: int, thresholds: Thresholds) -> None:
        """Add the result of one recomputation.

        When the run's honest mismatch rate changes, earlier results are dropped.
        """
        if thresholds.honest_mismatch_rate != self.thresholds.honest_mismatch_rate:
            self.mismatches = self.positions = 0
        self.thresholds = thresholds
        self.mismatches += mismatches
        self.positions += positions

    def p_value(self, honest_rate: float) -> float:
        """The probability that a worker with this honest rate has at least these mismatches."""
        return binomial_tail(self.mismatches, self.positions, honest_rate)


def prefill_wanted(secret: bytes, submission: bytes, share: float) -> bool:
    """Whether a submission, by its digest, is drawn for recomputation.

    The worker does not know the validator's secret, so it cannot influence the draw.
    """
    drawn = int.from_bytes(digest("swarm/1/prefill", secret, submission)[:8], "big")
    return drawn < share * 2**64


class Duplicates:
    """Recognises groups that any worker submitted before."""

    def __init__(self, groups_max: int = DUPLICATE_GROUPS_MAX) -> None:
        self._groups_max = groups_max
        self._first: OrderedDict[bytes, bytes] = OrderedDict()
        """The first submission (a hash over its groups) of each group, by the group's digest."""

    def seen(self, group_digests: Sequence[bytes], worker: str) -> int:
        """Count the groups copied from other submissions, and remember all groups.

        Returns 0 unless more than half are copies. Prompts and noise follow from a submission's own
        seed, so two honest submissions share a group only if both drew the same task (in the demo,
        one in a million) and sampled the same short answers. That is not a copy, and a group copied
        under another seed fails the sampling check anyway. A submission that is judged again is not
        a copy of itself.
        """
        own = blake3.blake3(worker.encode() + b"".join(group_digests)).digest()
        copies = sum(self._first.setdefault(group, own) != own for group in group_digests)
        while len(self._first) > self._groups_max:
            self._first.popitem(last=False)
        return copies if copies * 2 > len(group_digests) else 0


@dataclass
class Pace:
    """A worker's claimed generation speed, for `peers.validator.checks.history.Speed`."""

    started: float = -math.inf
    tokens: int = 0

    def observe(self, tokens: int, now: float) -> float:
        """Add a submission received at `now` (seconds); returns tokens per second since the first.

        The first submission gives 0, and a burst counts as if it had taken 1 s.
        """
        if self.started == -math.inf:
            self.started = now
            return 0.0
        self.tokens += tokens
        return self.tokens / max(1.0, now - self.started)
