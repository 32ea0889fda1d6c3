"""Residual freedom: near ties that depend on the outcome, and those that do not."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.validator.evidence.selection import HONEST_TILT, TILTS, WINDOW_TIES, gains
from peers.validator.evidence.submission import log_e_value
from swarm.ledger.capital import UNITS_PER_NAT

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


@given(GROUPS, st.integers(0, 5), st.floats(-HONEST_TILT, HONEST_TILT))
def test_no_bet_is_better_than_fair_for_any_honest_tilt(
    rows: list[tuple[int, float]], mismatches: int, tilt: float
) -> None:
    lengths, outcomes = [row[0] for row in rows], [row[1] for row in rows]
    every = arrangements(lengths, min(mismatches, sum(lengths)))
    least, range_ = min(outcomes), max(outcomes) - min(outcomes)
    scaled = [(each - least) / range_ if range_ else 0.0 for each in outcomes]
    capitals = np.array(
        [[math.exp(gain / UNITS_PER_NAT) for gain in gains([ties], [[outcomes]])] for ties in every]
    )

    def mean(tilt: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        weights = [
            math.exp(tilt * sum(y * sum(row) for y, row in zip(scaled, ties, strict=True)))
            for ties in every
        ]
        return np.average(capitals, axis=0, weights=weights)

    assert (mean(tilt) <= 1 + 1e-9).all()
    positive = np.array(TILTS) > 0
    for edge in (HONEST_TILT, -HONEST_TILT):  # gains are rounded down
        fair = mean(edge)[positive == (edge > 0)]
        assert (fair >= 1 - 1.5 / UNITS_PER_NAT).all()


def taken(sign: int, groups: int) -> tuple[list[list[list[bool]]], list[list[float]]]:
    """Ties of a worker who takes two in five of those that raise (or lower) the reward."""
    drawn = np.random.default_rng(0)
    ties, rewards = [], []
    for _ in range(groups):
        outcome = (drawn.random(8) < 0.5).astype(float)
        near = drawn.integers(0, 5, 8)
        ties.append(
            [
                [bool(y == (sign > 0) and drawn.random() < 0.4) for _ in range(n)]
                for n, y in zip(near, outcome, strict=True)
            ]
        )
        rewards.append(outcome.tolist())
    return ties, rewards


@pytest.mark.parametrize("sign", [1, -1])
def test_a_worker_who_takes_ties_for_or_against_reward_is_seen(sign: int) -> None:
    ties, rewards = taken(sign, 40)
    assert log_e_value(gains(ties, [rewards])) > math.log(1e9)


def test_evidence_adds_up_over_submissions_of_one_tie_in_ten_tokens() -> None:
    """Each submission alone is far from suspicious."""
    ties, rewards = taken(1, 100)
    parts = [gains([each], [[reward]]) for each, reward in zip(ties, rewards, strict=True)]
    assert max(log_e_value(part) for part in parts) < math.log(1e6)
    assert log_e_value([sum(bet) for bet in zip(*parts, strict=True)]) > math.log(1e9)


@pytest.mark.parametrize("bias", [0.0, 0.05])
def test_honest_mismatches_win_nothing(bias: float) -> None:
    """Nor if rounding makes a mismatch a little likelier where the outcome is low."""
    drawn = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        near = drawn.integers(0, 5, (4, 8))
        rewards = (drawn.random((4, 8)) < 0.5).astype(float)
        ties = [
            [
                (drawn.random(n) < 0.3 + bias * (1 - y)).tolist()
                for n, y in zip(row, reward, strict=True)
            ]
            for row, reward in zip(near, rewards, strict=True)
        ]
        refused += log_e_value(gains(ties, [rewards.tolist()])) >= math.log(20)
    assert refused / 300 <= 1 / 20


def test_long_groups_are_compared_window_by_window() -> None:
    ties = [[[index % 3 == 0 for index in range(WINDOW_TIES)], [False, True] * WINDOW_TIES]]
    half = WINDOW_TIES // 2
    parts = [
        gains([[row[start : start + half] for row in ties[0]]], [[[0.0, 1.0]]])
        for start in range(0, 2 * WINDOW_TIES, half)
    ]
    whole = gains(ties, [[[0.0, 1.0]]])
    assert [sum(bet) for bet in zip(*parts, strict=True)] == pytest.approx(whole, abs=len(parts))


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
    assert gains(ties, outcomes) == [0] * len(TILTS)
