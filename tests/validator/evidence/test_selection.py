"""Residual freedom: near ties that depend on the outcome, and those that do not."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.validator.evidence.betting import UNITS_PER_NAT, log_e_value
from peers.validator.evidence.selection import STAKES, gains

GROUPS = st.lists(
    st.tuples(st.integers(0, 3), st.floats(-5, 5, allow_nan=False)), min_size=2, max_size=4
)


def arrangements(lengths: list[int], mismatches: int) -> list[list[list[bool]]]:
    """All ways in which so many of a group's ties can be mismatches."""
    total = sum(lengths)
    found = []
    for chosen in itertools.combinations(range(total), mismatches):
        flat = iter([index in chosen for index in range(total)])
        found.append([[next(flat) for _ in range(length)] for length in lengths])
    return found


@given(GROUPS, st.integers(0, 5))
def test_over_all_arrangements_every_bet_is_fair(
    rows: list[tuple[int, float]], mismatches: int
) -> None:
    lengths, outcomes = [row[0] for row in rows], [row[1] for row in rows]
    every = arrangements(lengths, min(mismatches, sum(lengths)))
    capitals = np.mean(
        [
            [math.exp(gain / UNITS_PER_NAT) for gain in gains([ties], [[outcomes]])]
            for ties in every
        ],
        axis=0,
    )
    assert (capitals <= 1 + 1e-9).all()
    assert (capitals >= 1 - 1.5 / UNITS_PER_NAT).all()  # gains are rounded down


def test_a_worker_who_takes_ties_for_reward_is_seen() -> None:
    drawn = np.random.default_rng(0)
    ties, rewards = [], []
    for _ in range(150):
        outcome = (drawn.random(8) < 0.5).astype(float)
        near = drawn.integers(0, 5, 8)
        ties.append(
            [
                [bool(y and drawn.random() < 0.4) for _ in range(n)]
                for n, y in zip(near, outcome, strict=True)
            ]
        )
        rewards.append(outcome.tolist())
    assert log_e_value(gains(ties, [rewards])) > math.log(1e9)


def test_honest_mismatches_win_nothing() -> None:
    drawn = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        near = drawn.integers(0, 5, (4, 8))
        ties = [[(drawn.random(n) < 0.3).tolist() for n in row] for row in near]
        rewards = (drawn.random((4, 8)) < 0.5).astype(float).tolist()
        refused += log_e_value(gains(ties, [rewards])) >= math.log(20)
    assert refused / 300 <= 1 / 20


@pytest.mark.parametrize(
    ("ties", "outcomes"),
    [
        ([[[True], [False]]], [[[1.0, 1.0]]]),  # all outcomes equal
        ([[[True], [True]]], [[[0.0, 1.0]]]),  # nothing to choose
        ([[[], []]], [[[0.0, 1.0]]]),
        ([], [[]]),
    ],
)
def test_no_choice_is_no_evidence(
    ties: list[list[list[bool]]], outcomes: list[list[list[float]]]
) -> None:
    assert gains(ties, outcomes) == [0] * len(STAKES)
