"""Token buckets: no more than the burst and the rate allow, however they are asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.transport.rates import HOUR, HourlyBytes, NetworkBudgets, TokenBucket

PAUSES_AND_COSTS = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), max_size=50)
RATES = st.floats(0.1, 100)
BURSTS = st.floats(5, 100)


@given(asked=PAUSES_AND_COSTS, per_second=RATES, burst=BURSTS)
def test_no_more_is_taken_than_burst_and_rate_allow(asked, per_second, burst) -> None:
    bucket = TokenBucket(per_second, burst)
    now, taken = 1000.0, 0.0
    for pause, cost in asked:
        now += pause
        taken += cost if bucket.take(cost, now) else 0.0
        assert taken <= burst + (now - 1000.0) * per_second + 1e-6


@given(asked=PAUSES_AND_COSTS, per_second=RATES, burst=BURSTS)
def test_who_waits_as_said_keeps_to_the_rate(asked, per_second, burst) -> None:
    bucket = TokenBucket(per_second, burst)
    now, taken = 0.0, 0.0
    for pause, cost in asked:
        now += pause
        bucket.borrow(cost, now)
        now += bucket.debt_seconds(now)
        taken += cost
        assert taken <= burst + now * per_second + 1e-6 * (1 + taken)


def test_a_debt_is_waited_for_and_what_is_given_back_is_not() -> None:
    bucket = TokenBucket(per_second=10.0, burst=5.0)
    bucket.borrow(5, 0.0)
    assert bucket.debt_seconds(0.0) == 0.0
    bucket.borrow(20, 0.0)
    assert bucket.debt_seconds(0.0) == pytest.approx(2.0)
    bucket.give_back(20)
    assert bucket.debt_seconds(0.0) == 0.0
    bucket.borrow(10, 0.0)
    assert bucket.debt_seconds(0.5) == pytest.approx(0.5)
    assert bucket.debt_seconds(1.0) == 0.0


def test_identities_without_a_network_share_a_budget_and_leave_networks_theirs() -> None:
    budgets = NetworkBudgets(HourlyBytes(network=10, unplaced=40, all=100))

    def granted(network: str) -> int:
        return sum(budgets.take(f"peer {number}", network, 5, 0.0) for number in range(50))

    assert granted("") * 5 == 40
    assert granted("192.0.2.0/24") * 5 == 10
    assert sum(granted(f"198.51.{number}.0/24") for number in range(50)) * 5 == 100 - 40 - 10
    assert not budgets.take("late", "203.0.113.0/24", 5, 0.0)
    assert budgets.take("late", "203.0.113.0/24", 5, HOUR)


def test_bytes_are_taken_whole_or_not() -> None:
    budgets = NetworkBudgets(HourlyBytes(network=10, unplaced=100, all=12))
    assert budgets.take("a", "x", 8, 0.0)
    assert not budgets.take("b", "y", 8, 0.0)  # and nothing of the network's is gone
    assert budgets.take("c", "y", 4, 0.0)
