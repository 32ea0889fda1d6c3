"""Residual freedom: do tolerated mismatches depend on a rollout's outcome?

Where two tokens are nearly tied, rounding decides, and a validator must tolerate either. A worker
may use that freedom to choose the token that leads to more reward, to a stop or to a longer text.
An honest worker's rounding knows nothing of the outcome: among the near ties of a group, given how
many of them fell to the other side, every arrangement is equally likely. (Which of two nearly tied
tokens the validator finds ahead is the seed's chance, whichever of them is better.)

The group's ties are read in order. Before tie i, the honest probability that it is a mismatch is
q = (mismatches left) / (ties left), and a bet of stake λ multiplies its capital by
1 + λ(y − ȳ)(b − q), where b = 1 for a mismatch, y in [0, 1] is the outcome of the tie's rollout and
ȳ the mean over all ties of the group. The factor is 1 on average, so the capital is a martingale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from peers.validator.evidence.betting import rounded

STAKES = (-0.9, -0.3, 0.3, 0.9)
"""Negative stakes win if mismatches come with a low outcome, positive ones with a high outcome."""

TIE_WIDTH = 0.1
"""Perturbed logits that differ by less are nearly tied. Honest 16-bit engines seldom differ by
more, and a worker with more freedom than this is seen by the other processes."""


def gains(
    ties: Sequence[Sequence[Sequence[bool]]], outcomes: Sequence[Sequence[Sequence[float]]]
) -> list[int]:
    """The growth of each bet's log capital, in thousandths of a nat, rounded down.

    `ties` [groups][group size] has each rollout's near ties in the order of their positions, True
    for a mismatch; `outcomes` [kinds of outcome][groups][group size]. Bets on one kind of outcome
    follow those on another.
    """
    found = []
    for kind in outcomes:
        totals = [0.0] * len(STAKES)
        for group_ties, group_outcomes in zip(ties, kind, strict=True):
            for index, growth in enumerate(_growths(group_ties, group_outcomes)):
                totals[index] += growth
        found += [rounded(total) for total in totals]
    return found


def _growths(ties: Sequence[Sequence[bool]], outcomes: Sequence[float]) -> list[float]:
    """Each bet's growth over one group, in nats."""
    growths = [0.0] * len(STAKES)
    least, range_ = min(outcomes), max(outcomes) - min(outcomes)
    left, mismatches = sum(map(len, ties)), sum(map(sum, ties))
    if range_ <= 0 or mismatches in (0, left):
        return growths
    scaled = [(outcome - least) / range_ for outcome in outcomes]
    mean = sum(y * len(row) for y, row in zip(scaled, ties, strict=True)) / left
    for y, row in zip(scaled, ties, strict=True):
        for mismatch in row:
            surprise = (y - mean) * (mismatch - mismatches / left)
            for index, stake in enumerate(STAKES):
                growths[index] += math.log1p(stake * surprise)
            left -= 1
            mismatches -= mismatch
    return growths
