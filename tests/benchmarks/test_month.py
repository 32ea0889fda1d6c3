"""A simulated month: its slopes, and a short one in which nothing grows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.month import FEW_PROOFS, Diary, Size, line_through, measure, slopes


@given(
    st.floats(-10, 10),
    st.floats(-100, 100),
    st.lists(st.floats(0, 30), min_size=4, max_size=40, unique_by=lambda time: round(time, 1)),
)
def test_a_line_has_its_slope_without_error(slope: float, start: float, times: list[float]) -> None:
    found, error = line_through(times, [start + slope * time for time in times])
    assert found == pytest.approx(slope, abs=1e-6)
    assert error == pytest.approx(0.0, abs=1e-6)


def test_residuals_that_follow_each_other_make_a_slope_less_sure() -> None:
    times = [float(time) for time in range(12)]
    alternating = line_through(times, [(-1.0) ** time for time in range(12)])
    following = line_through(times, [1.0 if time % 6 < 3 else -1.0 for time in range(12)])
    assert following[1] > 1.3 * alternating[1]


def diary(value_at: dict[str, float], *, sawtooth: float) -> Diary:
    """Thirty days of which the last epoch is unfinished; `value_at` gives the rise of each day."""
    kept = Diary(Size(days=30, day_seconds=100.0))
    kept.seals = [0.7 * number for number in range(43)]
    for hour in range(30 * 12):
        day = hour / 12
        since = day % 0.7 / 0.7
        kept.samples.append(
            (
                day,
                {
                    ("peer", name): 100 + a_day * day + sawtooth * since
                    for name, a_day in value_at.items()
                },
            )
        )
    return kept


def test_a_saw_of_the_epochs_hides_no_growth_and_looks_like_none() -> None:
    found = {
        each.quantity: each
        for each in slopes(diary({"a": 0.0, "b": 2.0, "c": -2.0}, sawtooth=400.0))
    }
    assert abs(found["a"].percent_a_week) < 1.0 and found["a"].trend in ("flat", "unsure")
    assert found["b"].trend == "grows" and found["c"].trend == "shrinks"
    assert found["b"].a_day == pytest.approx(2.0, abs=0.3)


def test_too_few_epochs_have_no_slope() -> None:
    short = diary({"a": 0.0}, sawtooth=0.0)
    short.seals = short.seals[-4:]
    assert slopes(short) == []


BOUNDED = {
    "memory Deliveries._receipts",
    "memory Gate._seen",
    "memory Neighbour.knows",
    "memory Neighbour.pushed",
    "memory ProviderStore._entries",
    "memory ProviderStore._entries[]",
    "memory Store._events",
}
"""Collections with a bound that a short month does not reach: a number, or an expiry."""
GROWTH_MAX = 0.2
"""Entries per step above which a quantity grows with the steps."""


def lower_bounds(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Let peers remember so many steps, so that a short run reaches the bound."""
    for bound in (
        "peers.trainer.publishing.STEPS_REMEMBERED",
        "peers.trainer.progress.STEPS_REMEMBERED",
        "peers.trainer.store.ORDERS_KEPT",
        "peers.trainer.precedence.ACKNOWLEDGED_KEPT",
        "swarm.node.policies.ANNOUNCEMENTS_MAX",
    ):
        monkeypatch.setattr(bound, steps)


@pytest.mark.slow
def test_no_table_or_collection_grows_with_the_days(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_bounds(monkeypatch, 20)
    monkeypatch.setitem(FEW_PROOFS["inference"], "proofs_kept_bytes", 10_000)
    size = Size(
        days=9, day_seconds=100.0, validators=2, workers=2, restarts_per_day=0, leavers_per_day=0,
        step_seconds=6.0, groups_per_step=4, stake_steps=1, epoch_entries=40,
    )  # fmt: skip
    month = measure(size, lambda _: None)
    assert month.slopes and not month.violations
    growing = {
        f"{each.role}: {each.quantity}"
        for each in month.growing
        if each.a_day * size.days > GROWTH_MAX * month.steps and each.quantity not in BOUNDED
    }
    assert not growing
