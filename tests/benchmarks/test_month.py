"""The slopes of a simulated month."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.operation.month import Diary, Size, line_through, slopes


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
    kept = Diary(Size(days=30))
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
