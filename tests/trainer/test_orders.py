"""What a step order asks for: the groups that are coming, and the share that the filter keeps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.trainer.forecast import (
    JUDGED_MAX,
    JUDGED_SECONDS,
    KEEP_RATE_MIN,
    SMOOTHING,
    UNJUDGED_SECONDS,
    Forecast,
    KeepRate,
    groups_to_ask_for,
)
from peers.trainer.pool import GroupLabel

OFFER = ("worker", b"digest")


def test_groups_are_coming_from_the_announcement_until_they_are_settled() -> None:
    forecast = Forecast()
    assert forecast.announce(OFFER, 4, now=0.0, has_stake=True)
    assert forecast.announce(OFFER, 9, now=1.0, has_stake=True), "the first word on a file counts"
    assert forecast.coming() == 4
    forecast.judge(OFFER, "accepted", now=0.0)
    assert forecast.coming() == 4, "its file is being fetched"
    forecast.settle(OFFER)
    assert forecast.coming() == 0


def test_an_acknowledgement_after_the_verdict_is_not_waited_for() -> None:
    forecast = Forecast()
    forecast.judge(OFFER, "accepted", now=0.0)
    assert not forecast.announce(OFFER, 4, now=0.0, has_stake=True)
    forecast.judge(("worker", b"later"), "accepted", now=1.0)
    forecast.forget_late(JUDGED_SECONDS)
    assert not forecast.announce(OFFER, 4, now=JUDGED_SECONDS, has_stake=True)
    forecast.forget_late(JUDGED_SECONDS + 0.5)
    assert forecast.announce(OFFER, 4, now=JUDGED_SECONDS + 0.5, has_stake=True), (
        "no acknowledgement comes so late"
    )
    assert not forecast.announce(("worker", b"later"), 4, now=JUDGED_SECONDS + 0.5, has_stake=True)


def test_so_many_judged_submissions_are_remembered() -> None:
    forecast = Forecast()
    forecast.judge(OFFER, "accepted", now=0.0)
    for number in range(JUDGED_MAX):
        forecast.judge(("worker", number.to_bytes(4, "big")), "accepted", now=0.0)
    assert forecast.announce(OFFER, 4, now=0.0, has_stake=True), "the oldest is forgotten"


def test_what_is_not_judged_for_long_leaves_the_forecast_as_wasted() -> None:
    forecast = Forecast()
    forecast.announce(OFFER, 4, now=0.0, has_stake=True)
    forecast.announce(("worker", b"later"), 2, now=1.0, has_stake=True)
    assert forecast.forget_late(UNJUDGED_SECONDS) == 0
    assert not forecast.quota_spent(refill=False)
    assert forecast.forget_late(UNJUDGED_SECONDS + 0.5) == 1
    assert forecast.coming() == 2
    assert forecast.quota_spent(refill=False)


def test_quota_is_spent_by_what_serves_no_batch_until_the_next_order() -> None:
    forecast = Forecast()
    forecast.judge(OFFER, "accepted", now=0.0)
    assert not forecast.quota_spent(refill=False)
    assert forecast.quota_spent(refill=True), "what was accepted may fill nothing"
    forecast.judge(OFFER, "refused", now=0.0)
    assert forecast.quota_spent(refill=False)
    forecast.order_issued()
    assert not forecast.quota_spent(refill=True)
    forecast.waste(1)
    assert forecast.quota_spent(refill=False)


def test_nothing_is_expected_of_a_worker_that_was_refused_until_it_is_accepted() -> None:
    """Or it could hold up a step, or have more asked of everybody, as often as it likes."""
    forecast = Forecast()
    forecast.judge(("worker", b"0"), "refused", now=0.0)
    assert forecast.quota_spent(refill=False), "the first one is made up for at once"
    forecast.order_issued()
    for number in range(1, 9):
        offer = ("worker", b"%d" % number)
        assert not forecast.announce(offer, 4, now=0.0, has_stake=True)
        forecast.judge(offer, "refused", now=0.0)
    assert forecast.coming() == 0 and not forecast.quota_spent(refill=True)
    assert forecast.announce(("another", b"0"), 4, now=0.0, has_stake=True)
    forecast.judge(("worker", b"9"), "accepted", now=0.0)
    assert forecast.announce(("worker", b"10"), 4, now=0.0, has_stake=True)
    forecast.judge(("worker", b"10"), "quarantined", now=0.0)
    assert forecast.quota_spent(refill=False), "a validator's fault is made up for"
    assert forecast.announce(("worker", b"11"), 4, now=0.0, has_stake=True)


def test_files_of_workers_without_a_record_are_not_expected() -> None:
    """An acknowledgement says that a file has arrived, not that anything is in it."""
    forecast = Forecast()
    for number in range(4):
        assert not forecast.announce((f"new-{number}", b"1"), 4, now=0.0, has_stake=False)
    assert forecast.coming() == 0
    forecast.judge(("new-0", b"1"), "accepted", 1.0)
    assert forecast.announce(("new-0", b"2"), 4, now=1.0, has_stake=False)
    forecast.judge(("new-0", b"3"), "refused", 2.0)
    assert not forecast.announce(("new-0", b"4"), 4, now=2.0, has_stake=True)
    assert forecast.coming() == 4


def test_checks_that_take_minutes_stay_in_the_forecast() -> None:
    forecast = Forecast()
    forecast.announce(OFFER, 4, now=0.0, has_stake=True)
    assert forecast.forget_late(UNJUDGED_SECONDS + 1) == 1
    forecast.judge(OFFER, "accepted", now=120.0)
    forecast.announce(("worker", b"later"), 4, now=120.0, has_stake=True)
    assert forecast.forget_late(120.0 + 300.0) == 0 and forecast.coming() == 4
    assert forecast.forget_late(120.0 + 400.0) == 1


@given(st.lists(st.lists(st.sampled_from(["kept", "no_spread"]), min_size=1), min_size=1))
def test_the_keep_rate_is_an_average_without_a_beginning(shares: list[list[GroupLabel]]) -> None:
    """Weighted by (1 − s)^age; bounded below, so that what is asked for is bounded too."""
    rate = KeepRate()
    assert rate.value == 1.0
    for some in shares:
        rate.observe(some)
    weights = [(1 - SMOOTHING) ** age for age in range(len(shares))][::-1]
    values = [some.count("kept") / len(some) for some in shares]
    expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert rate.value == pytest.approx(max(KEEP_RATE_MIN, expected))


@given(st.integers(-50, 500), st.floats(KEEP_RATE_MIN, 1.0), st.integers(0, 500))
def test_what_is_asked_for_makes_up_what_is_missing(missing: int, rate: float, coming: int) -> None:
    asked = groups_to_ask_for(missing, rate, coming)
    assert asked >= 0
    if asked:
        assert (asked + coming) * rate >= missing - 1e-6
        assert (asked - 1 + coming) * rate < missing
    else:
        assert math.ceil(missing / rate - 1e-9) <= coming


def test_nothing_left_out_asks_for_exactly_what_is_missing() -> None:
    assert groups_to_ask_for(32, 1.0, 0) == 32
    assert groups_to_ask_for(32, 0.25, 28) == 100
