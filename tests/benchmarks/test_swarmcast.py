"""Broadcasts by shardcast alone, and their bounds."""

from __future__ import annotations

import pytest

from benchmarks.swarmcast import GIGABIT, Case, bound, bound_of, broadcast, headline
from simnet.lines import REGIONS, Line

SIZE = 8_000_000


def test_the_bounds_are_those_of_the_headline_profile() -> None:
    case = headline(1000, 1, size_bytes=62_000_000_000)
    terms = bound(case)
    assert terms["source"] == pytest.approx(496.0)
    assert terms["downlink"] == pytest.approx(992.0)
    assert terms["capacity"] == pytest.approx(1000 * 62e9 / (125e6 + 1000 * 25.625e6))
    assert bound_of(case, 500)["capacity"] == pytest.approx(terms["capacity"] / 2)
    churned = headline(1000, 1, size_bytes=62_000_000_000, churn=0.1)
    assert bound(churned)["capacity"] == pytest.approx(0.9 * terms["capacity"])
    relays = headline(100, 1, size_bytes=62_000_000_000, relay_only=True)
    assert bound(relays)["capacity"] == pytest.approx(100 * 62e9 / (10 * 125e6))


def test_one_seed_is_one_broadcast() -> None:
    case = headline(8, 5, size_bytes=SIZE)
    first, again = broadcast(case), broadcast(case)
    assert first.trace_hash == again.trace_hash
    assert sorted(first.finished) == list(range(8))
    assert first.pieces == 8 * (3 * 13 + 1)  # 13 files of 3 pieces, and the manifest
    assert min(first.finished.values()) > max(bound_of(case, 1).values())


@pytest.mark.slow
def test_receivers_in_relay_only_mode_send_nothing() -> None:
    case = headline(10, 2, size_bytes=SIZE, relay_only=True)
    outcome = broadcast(case)
    assert sorted(outcome.finished) == list(range(10))
    assert outcome.sent_by_receivers == 0
    assert broadcast(headline(10, 2, size_bytes=SIZE)).sent_by_receivers > 0


def test_a_slow_source_is_the_bound() -> None:
    line = Line("us-east", 12.5e6, 125e6)
    case = Case(1, SIZE, Line("us-east", 1e6, 1e6), [line] * 4)
    outcome = broadcast(case)
    seconds = max(bound(case).values())
    assert seconds == 8.0
    assert seconds < max(outcome.finished.values()) < 3 * seconds + 10


@pytest.mark.slow
def test_of_one_relay_far_away_more_is_asked_at_once() -> None:
    case = headline(10, 2, size_bytes=150_000_000, relay_only=True)
    assert len(case.relays) == 1
    # Four pieces of 256 KiB at a time made it 3.9 times the bound.
    assert max(broadcast(case).finished.values()) < 1.5 * max(bound(case).values())


@pytest.mark.slow
def test_small_pieces_on_long_fast_lines_do_not_wait_for_their_requests() -> None:
    fast = [Line(region, GIGABIT, GIGABIT) for region in (*REGIONS, *REGIONS)][:8]
    case = Case(1, 300_000_000, Line("us-east", GIGABIT, GIGABIT), fast)
    finished = broadcast(case).finished
    assert len(finished) == 8
    # With eight requests at a time, whatever the distance, it is seven times the bound.
    assert max(finished.values()) < 5 * max(bound(case).values())
