"""Residual freedom: do tolerated mismatches depend on a rollout's outcome?

Where two tokens are nearly tied, rounding decides, and a validator must tolerate either. A worker
may use that freedom to choose the token that leads to more reward (or less), to a stop or to a
longer text. An honest worker's rounding knows nothing of the outcome: which of two nearly tied
tokens the validator finds ahead is the seed's chance, whichever of them is better. So among a
group's near ties, given how many of them are mismatches, every arrangement is about equally likely.

A bet of tilt θ claims that an arrangement is likelier by exp(θ·Y), where Y is the sum of the
mismatches' outcomes, each scaled to [0, 1] within its group (Fisher's noncentral hypergeometric
distribution). Rounding may itself be slightly better for one outcome, since it makes a policy
slightly worse. So the bet is placed against an honest tilt of at most `HONEST_TILT`, of the same
sign: it multiplies its capital by the ratio of the two likelihoods. That ratio grows (falls, if θ
is negative) with Y, and Y with the true tilt; so for every honest tilt it is at most 1 on average,
and the capital is a supermartingale."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from swarm.ledger.capital import rounded

TILTS = (-4.0, -2.0, -1.0, 1.0, 2.0, 4.0)
"""Negative tilts win if mismatches come with a low outcome, positive ones with a high outcome."""

HONEST_TILT = 0.5
"""Measured on the demo's policies: -0.2 ± 0.1 for bf16 against fp32 and bf16."""

TIE_WIDTH = 0.5
"""Perturbed logits that differ by less are nearly tied. Honest 16-bit engines seldom differ by more
than 0.1, but mismatches need other ties of their group to be compared with. In wider ties the
likelier token is the one ahead more often, so they come with other outcomes."""

WINDOW_TIES = 256
"""Ties of a group that are compared with each other. Time grows with it times the ties: at most 2 s
for a group of 256,000 tokens of a cheat, 0.4 s of honest ones."""


def gains(
    ties: Sequence[Sequence[Sequence[bool]]], outcomes: Sequence[Sequence[Sequence[float]]]
) -> list[int]:
    """The growth of each bet's log capital, in thousandths of a nat, rounded down.

    `ties` [groups][group size] has each rollout's near ties in the order of their positions, True
    for a mismatch; `outcomes` [kinds of outcome][groups][group size]. Bets on one kind of outcome
    follow those on another."""
    found = []
    for kind in outcomes:
        total = np.zeros(len(TILTS))
        for group_ties, group_outcomes in zip(ties, kind, strict=True):
            total += _growths(group_ties, group_outcomes)
        found += [rounded(float(nats)) for nats in total]
    return found


def _growths(
    ties: Sequence[Sequence[bool]], outcomes: Sequence[float]
) -> npt.NDArray[np.floating[Any]]:
    """Each bet's growth over one group, in nats."""
    total = np.zeros(len(TILTS))
    least, range_ = min(outcomes), max(outcomes) - min(outcomes)
    if range_ <= 0:
        return total
    # Each window is a bet of its own, given how many of its ties are lost, so growths add up. It
    # has ties of every rollout, since all ties of one rollout have the same outcome.
    scaled = [(outcome - least) / range_ for outcome in outcomes]
    width = max(1, WINDOW_TIES // len(ties))
    for start in range(0, max(map(len, ties)), width):
        window = [row[start : start + width] for row in ties]
        outcome = np.repeat(scaled, [len(row) for row in window])
        lost = np.fromiter(chain.from_iterable(window), dtype=bool)
        # Otherwise all arrangements have the same sum: nothing to bet on.
        if 0 < lost.sum() < len(lost) and np.ptp(outcome) > 0:
            total += _growth(outcome, lost)
    return total


def _growth(
    outcomes: npt.NDArray[np.floating[Any]], lost: npt.NDArray[np.bool_]
) -> npt.NDArray[np.floating[Any]]:
    """Each bet's growth over ties [n] of which some are lost."""
    # The ratio of the likelihoods under the tilt that is claimed and under the most that an honest
    # worker may have, exp(θY) / Σ exp(θY'), each over all choices of as many lost ties.
    tilts = np.array([*TILTS, *(math.copysign(HONEST_TILT, tilt) for tilt in TILTS)])
    likelihoods = tilts * outcomes[lost].sum() - _log_weights(outcomes, int(lost.sum()), tilts)
    claimed, honest = np.split(likelihoods, 2)
    growth: npt.NDArray[np.floating[Any]] = claimed - honest
    return growth


def _log_weights(
    outcomes: npt.NDArray[np.floating[Any]], count: int, tilts: npt.NDArray[np.floating[Any]]
) -> npt.NDArray[np.floating[Any]]:
    """log of the sum of exp(tilt · Y) over all choices of `count` ties, for each tilt."""
    # Elementary symmetric polynomials of exp(tilt · outcome), one tie at a time, in logs: e_k of
    # the first n ties is e_k of n − 1, plus the n-th times e_(k − 1) of n − 1.
    logs = np.full((len(tilts), count + 1), -np.inf)
    logs[:, 0] = 0.0
    for outcome in outcomes:
        logs[:, 1:] = np.logaddexp(logs[:, 1:], logs[:, :-1] + tilts[:, None] * outcome)
    return logs[:, -1]
