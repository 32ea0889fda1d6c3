from __future__ import annotations

from collections import Counter

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarm.shardcast import limits, sources
from swarm.shardcast.sources import SourceBook, source_name
from swarm.transport import Source
from tests.worlds import VirtualWorld


async def test_averages_follow_the_published_rule() -> None:
    book = SourceBook(VirtualWorld())
    book.succeeded("a", 1_000_000, 1.0)
    assert book.bandwidth("a") == 1_000_000
    book.succeeded("a", 2_000_000, 1.0)
    assert book.bandwidth("a") == pytest.approx(0.7e6 + 0.3 * 2e6)
    book.failed("a")
    assert book.success_rate("a") == pytest.approx(0.7 + 0.01)
    before = book.success_rate("a")
    for _ in range(5):
        book.succeeded("b", 1_000_000, 1.0)
    assert book.success_rate("a") == pytest.approx(before + 5 * 0.01), "healed by others"
    for _ in range(100):
        book.succeeded("b", 1_000_000, 1.0)
    assert book.success_rate("a") == 1.0


async def test_a_small_piece_says_nothing_of_bandwidth() -> None:
    book = SourceBook(VirtualWorld())
    book.succeeded("a", 200, 1.0)
    assert book.bandwidth("a") == limits.SOURCE_BANDWIDTH_INITIAL
    book.given_up("a", 200, 1.0)
    expected = 0.7 * limits.SOURCE_BANDWIDTH_INITIAL + 0.3 * 64 * 1024
    assert book.bandwidth("a") == pytest.approx(expected)
    book.given_up("a", 10**9, 1.0)
    assert book.bandwidth("a") == pytest.approx(expected), "it may have been that fast"


async def test_what_arrives_together_is_measured_while_something_is_requested() -> None:
    book = SourceBook(VirtualWorld())
    for _ in range(60):  # two sources at 100 KB/s each
        await trio.sleep(2.0)
        book.succeeded("a", 200_000, 2.0)
        book.succeeded("b", 200_000, 2.0)
    assert book.inflow == pytest.approx(200_000, rel=0.3)
    before = book.inflow
    await trio.sleep(1000.0)
    book.succeeded("a", 400_000, 2.0)
    assert book.inflow == pytest.approx(before, rel=0.05), "idle time is not slowness"
    for _ in range(20):
        await trio.sleep(2.0)
        book.succeeded("a", 20_000_000, 2.0)
    assert book.inflow == pytest.approx(1e7, rel=0.05)


async def test_sampling_is_in_proportion_and_repeats_from_a_seed() -> None:
    def draw(seed: int) -> list[str]:
        book = SourceBook(VirtualWorld(seed))
        book.succeeded("slow", 100_000, 1.0)
        book.succeeded("fast", 300_000, 1.0)
        names = ["slow", "fast"]
        return [names[book.choose(names)] for _ in range(4000)]

    counts = Counter(draw(1))
    assert 0.70 < counts["fast"] / 4000 < 0.80
    assert draw(1) == draw(1) != draw(2)


async def test_a_new_source_is_taken_for_as_fast_as_the_fastest() -> None:
    book = SourceBook(VirtualWorld())
    assert book.bandwidth("first") == limits.SOURCE_BANDWIDTH_INITIAL
    book.succeeded("slow", 10**5, 1.0)
    book.succeeded("fast", 10**9, 1.0)
    assert book.bandwidth("new") == 10**9
    assert book.success_rate("new") == 1.0


async def test_corruption_weighs_more_than_failure_and_is_not_pardoned_by_success() -> None:
    book = SourceBook(VirtualWorld())
    for name in ("honest", "unlucky", "liar"):
        book.succeeded(name, 1_000_000, 1.0)
    book.failed("unlucky")
    book.corrupt("liar")
    assert book.weight("liar") < 0.15 * book.weight("unlucky") < book.weight("honest")
    now = trio.current_time()
    assert book.record("liar").paused_until == now + sources.SOURCE_CORRUPT_SECONDS
    book.succeeded("liar", 1_000_000, 1.0)
    assert book.record("liar").paused_until == now + sources.SOURCE_CORRUPT_SECONDS
    book.corrupt("liar")
    assert book.record("liar").paused_until == now + 2 * sources.SOURCE_CORRUPT_SECONDS
    assert now < book.record("unlucky").paused_until < now + 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("sfcw")), max_size=60))
def test_rates_stay_rates(history: list[tuple[str, str]]) -> None:
    async def check() -> None:
        book = SourceBook(VirtualWorld())
        for name, what in history:
            match what:
                case "s":
                    book.succeeded(name, 10**6, 0.0)
                case "f":
                    book.failed(name)
                case "c":
                    book.corrupt(name)
                case _:
                    book.given_up(name, 1, 1e6)
            for each in "abc":
                assert 0.0 <= book.success_rate(each) <= 1.0
                assert book.weight(each) > 0.0
                assert book.record(each).paused_until < trio.current_time() + 1e5

    trio.run(check)


async def test_memory_is_bounded() -> None:
    book = SourceBook(VirtualWorld())
    for number in range(sources.SOURCES_KNOWN_MAX + 10):
        book.failed(str(number))
    assert len(book._records) == sources.SOURCES_KNOWN_MAX


async def test_new_names_do_not_make_it_forget_a_source_that_is_asked_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "SOURCES_KNOWN_MAX", 50)
    for used in ("paused", "weighed"):
        book = SourceBook(VirtualWorld())
        book.corrupt("liar")
        weight = book.weight("liar")
        for number in range(2 * sources.SOURCES_KNOWN_MAX):
            book.given_up(str(number), 1 << 16, 1.0)
            if number % 10 == 0 and used == "paused":
                book.known("liar")
            elif number % 10 == 0:
                book.weight("liar")
        assert book.record("liar").paused_until > trio.current_time()
        assert book.weight("liar") == weight
        assert book.known("never heard of") is None
        assert len(book._records) == sources.SOURCES_KNOWN_MAX


def test_names() -> None:
    assert source_name(Source(addresses=("http://a:1", "http://b:2"))) == "http://a:1"
    assert source_name(Source()) == "nobody"
