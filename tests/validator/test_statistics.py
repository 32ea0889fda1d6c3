"""Honest chance, records, copies, pace."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.validator.statistics import (
    Duplicates,
    Pace,
    WorkerRecord,
    binomial_tail,
    prefill_wanted,
)
from swarm.messages import Thresholds


def exact_tail(mismatches: int, positions: int, rate: Fraction) -> float:
    return float(
        sum(
            math.comb(positions, i) * rate**i * (1 - rate) ** (positions - i)
            for i in range(mismatches, positions + 1)
        )
    )


@settings(deadline=None)
@given(st.integers(0, 200), st.data(), st.sampled_from([Fraction(1, 100), Fraction(1, 3)]))
def test_the_tail_is_exact(positions: int, data: st.DataObject, rate: Fraction) -> None:
    mismatches = data.draw(st.integers(0, positions))
    found = binomial_tail(mismatches, positions, float(rate))
    assert found == pytest.approx(exact_tail(mismatches, positions, rate), rel=1e-9, abs=1e-300)


def test_the_tail_holds_for_long_records() -> None:
    assert binomial_tail(100_000, 10_000_000, 0.01) == pytest.approx(0.5, abs=0.01)
    assert binomial_tail(102_000, 10_000_000, 0.01) < 1e-9
    assert binomial_tail(98_000, 10_000_000, 0.01) == pytest.approx(1.0)
    assert binomial_tail(0, 0, 0.01) == 1.0
    assert binomial_tail(500, 500, 0.01) == 0.0  # below what a float holds


@pytest.mark.parametrize(
    ("mismatches", "positions", "rate"), [(-1, 5, 0.1), (6, 5, 0.1), (1, 5, 0)]
)
def test_no_tail_of_nonsense(mismatches: int, positions: int, rate: float) -> None:
    with pytest.raises(ValueError, match="no tail"):
        binomial_tail(mismatches, positions, rate)


def test_a_record_pools_what_it_saw() -> None:
    record = WorkerRecord()
    assert record.p_value(0.01) == 1.0
    for _ in range(100):
        record.observe(0, 200, Thresholds())
    assert record.p_value(0.01) == 1.0
    cheat = WorkerRecord()
    for _ in range(3):
        cheat.observe(18, 224, Thresholds())
    assert cheat.p_value(0.01) < 1e-9


def test_the_draw_follows_the_secret_and_the_share() -> None:
    digests = [number.to_bytes(32, "big") for number in range(2000)]
    drawn = [prefill_wanted(b"secret", digest, 0.25) for digest in digests]
    assert 400 < sum(drawn) < 600
    assert drawn != [prefill_wanted(b"another", digest, 0.25) for digest in digests]
    assert all(prefill_wanted(b"secret", digest, 1.0) for digest in digests)
    assert not any(prefill_wanted(b"secret", digest, 0.0) for digest in digests)


def group(name: str) -> bytes:
    return name.encode().ljust(32)


def test_copies_are_counted_but_chance_is_not() -> None:
    duplicates = Duplicates()
    first = [group(name) for name in "abcd"]
    assert duplicates.seen(first, "alice") == 0
    assert duplicates.seen(first, "alice") == 0  # judged again
    assert duplicates.seen(first, "mallory") == 4
    assert duplicates.seen([*first[:3], group("x")], "mallory") == 3
    assert duplicates.seen([first[0], *map(group, "efg")], "bob") == 0


def test_duplicates_forget_the_oldest() -> None:
    duplicates = Duplicates(groups_max=4)
    duplicates.seen([group("a")], "alice")
    duplicates.seen([group(name) for name in "bcde"], "alice")
    assert duplicates.seen([group("a")], "mallory") == 0
    assert duplicates.seen([group("e")], "mallory") == 1


def test_pace_counts_from_the_first_submission() -> None:
    pace = Pace()
    assert pace.observe(10_000, now=5.0) == 0.0
    assert pace.observe(100, now=5.1) == 100.0
    assert pace.observe(100, now=9.0) == 50.0
