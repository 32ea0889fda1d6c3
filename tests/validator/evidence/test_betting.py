"""Bets on bounded scores: fair under the null, at every look; powerful against shifts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.validator.evidence.submission import STAKES, gains, log_e_value, stakes
from swarm.ledger.capital import UNITS_PER_NAT, log_mean

MEANS = st.floats(1e-6, 0.9)


@given(MEANS, st.floats(0, 1))
def test_a_score_at_the_honest_mean_wins_nothing_on_average(mean: float, high: float) -> None:
    """A two-point score with the honest mean: the expected factor of every bet is 1."""
    high = max(high, mean)
    chance = mean / high
    for stake in stakes(mean):
        factor = chance * (1 + stake * (high - mean)) + (1 - chance) * (1 - stake * mean)
        assert factor == pytest.approx(1)
        assert 1 - stake * mean >= 0.5


@given(MEANS, st.lists(st.floats(0, 1), max_size=30), st.lists(st.floats(0, 1), max_size=30))
def test_gains_add_up_and_are_rounded_down(
    mean: float, first: list[float], second: list[float]
) -> None:
    parts = [gains(np.array(scores), mean) for scores in (first, second)]
    whole = gains(np.array(first + second), mean)
    for one, two, both in zip(*parts, whole, strict=True):
        assert one + two <= both <= one + two + 2
    exact = [sum(math.log1p(stake * (s - mean)) for s in first) for stake in stakes(mean)]
    for gain, nats in zip(parts[0], exact, strict=True):
        assert gain <= nats * UNITS_PER_NAT + 1e-6


@pytest.mark.parametrize("score", [-0.1, 1.1, math.nan])
def test_scores_are_bounded(score: float) -> None:
    with pytest.raises(ValueError, match="outside"):
        gains(np.array([score]), 0.1)


@pytest.mark.parametrize("mean", [0.0, 1.0, math.nan])
def test_a_mean_is_a_share(mean: float) -> None:
    with pytest.raises(ValueError, match="not between"):
        stakes(mean)


def test_no_scores_are_no_evidence() -> None:
    assert gains(np.array([]), 0.1) == [0] * len(STAKES)
    assert log_e_value([]) == log_e_value([0, 0]) == 0.0


def test_the_mean_of_logs_does_not_overflow() -> None:
    assert log_mean([5000.0, -5000.0]) == pytest.approx(5000 - math.log(2))
    assert log_mean([-math.inf, -math.inf]) == -math.inf


def test_an_honest_submission_is_refused_no_more_often_than_stated() -> None:
    """Scores at the bound itself, of the heaviest tail: 0 or 1."""
    drawn = np.random.default_rng(0)
    refused = sum(
        log_e_value(gains((drawn.random(500) < 0.01) * 1.0, 0.01)) >= math.log(20)
        for _ in range(2000)
    )
    assert refused / 2000 <= 1 / 20


@pytest.mark.parametrize(
    ("mean", "true", "size", "tokens"), [(1e-3, 5e-3, 0.3, 20_000), (0.02, 0.03, 0.05, 3_000)]
)
def test_a_shift_is_seen(mean: float, true: float, size: float, tokens: int) -> None:
    drawn = np.random.default_rng(1)
    for _ in range(20):
        scores = (drawn.random(tokens) < true / size) * size
        assert log_e_value(gains(scores, mean)) > math.log(1e9)
