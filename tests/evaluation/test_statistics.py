"""Figures of an evaluation against slow definitions and published values."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.evaluation.report import bootstrap, difference, estimate, pass_at_k, wilson


@given(samples=st.integers(1, 8), data=st.data())
@settings(max_examples=60, deadline=None)
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_sample(
    samples: int, data: st.DataObject
) -> None:
    solved = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    chosen = list(itertools.combinations([index < solved for index in range(samples)], k))
    assert pass_at_k(samples, solved, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_more_than_there_are_samples_is_no_figure() -> None:
    with pytest.raises(ValueError, match="pass@5"):
        pass_at_k(4, 1, 5)


def test_wilson_gives_the_published_values() -> None:
    """Newcombe 1998, table I, method 3, for 81 of 263, 15 of 148, 0 of 20 and 1 of 29."""
    for right, trials, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(right / trials, trials) == pytest.approx((low, high), abs=1e-4)


def test_the_interval_fits_the_values() -> None:
    assert estimate([0.0, 1.0, 1.0]).method == "wilson"
    assert estimate([0.25, 0.25]).method == "wilson"  # equal values: a bootstrap has no width
    assert estimate([0.25, 1.0, 0.5]).method == "bootstrap"
    assert estimate([-1.0, 1.0]).method == "bootstrap"  # no shares
    alone = estimate([-0.5])
    assert (alone.low, alone.high, alone.method) == (-0.5, -0.5, "none")


def test_the_bootstrap_covers_the_mean_as_often_as_it_says() -> None:
    source = random.Random(5)
    covered = 0
    for _ in range(100):
        low, high = bootstrap([source.betavariate(2, 3) for _ in range(40)])
        covered += low <= 0.4 <= high
    assert 88 <= covered <= 99
    assert bootstrap([0.1, 0.7, 0.4]) == bootstrap([0.1, 0.7, 0.4])


def test_a_gain_is_judged_task_by_task() -> None:
    """Two checkpoints that differ by the same on every task: the tasks' spread does not count."""
    base = [index / 10 for index in range(10)]
    gain = difference([value + 0.05 for value in base], base)
    assert (gain.value, gain.low, gain.high) == pytest.approx((0.05, 0.05, 0.05))
