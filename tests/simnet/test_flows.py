"""Fluid transfers, against exact max-min fair sharing."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from simnet.clock import Timeline, run_virtual
from simnet.flows import BATCH_SECONDS, Flow, Flows, Link


def with_flows(main: Callable[[Flows], Awaitable[Any]], seed: int = 1) -> Any:
    async def run() -> Any:
        timeline = Timeline()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(timeline.run)
            result = await main(Flows(timeline))
            nursery.cancel_scope.cancel()
        return result

    return run_virtual(run, seed=seed, limit_seconds=1e6)


async def transfer(flows: Flows, up: Link, down: Link, size_bytes: int) -> None:
    ended = trio.Event()
    flows.start(up, down, size_bytes, lambda flow: ended.set())
    await ended.wait()


def links(chance: random.Random, count: int) -> list[Link]:
    return [Link(chance.choice([1e6, 2e6, 5e6, 12.5e6, 125e6])) for _ in range(count)]


def exact_rates(pairs: list[tuple[Link, Link]]) -> list[float]:
    """Max-min fair rates of transfers over (uplink, downlink), by progressive filling: all rates
    rise together until a link is full; its transfers are then settled."""
    rates: list[float | None] = [None] * len(pairs)
    left: dict[Link, float] = {}
    for pair in pairs:
        for link in pair:
            left[link] = link.bytes_per_second
    while None in rates:
        counts: dict[Link, int] = {}
        for pair, rate in zip(pairs, rates, strict=True):
            if rate is None:
                for link in pair:
                    counts[link] = counts.get(link, 0) + 1
        full = min(counts, key=lambda link: left[link] / counts[link])
        share = left[full] / counts[full]
        for index, pair in enumerate(pairs):
            if rates[index] is None and full in pair:
                rates[index] = share
                for link in pair:
                    left[link] -= share
    return [rate for rate in rates if rate is not None]


def test_progressive_filling_gives_the_textbook_answer() -> None:
    wide, narrow = Link(10.0), Link(2.0)
    a, b, c = Link(100.0), Link(100.0), Link(3.0)
    # Two over the narrow uplink get 1 each; of the wide one's 10, 3 fill c and 7 go to a.
    rates = exact_rates([(narrow, a), (narrow, b), (wide, a), (wide, c)])
    assert rates == [1.0, 1.0, 7.0, 3.0]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 50), st.integers(1, 400))
def test_rates_are_max_min_fair_after_any_changes(seed: int, peers: int, count: int) -> None:
    async def main(flows: Flows) -> None:
        chance = random.Random(seed)
        ups, downs = links(chance, peers), links(chance, peers)
        running: list[Flow] = []
        for _ in range(count):
            running.append(flows.start(chance.choice(ups), chance.choice(downs), 10**15))
            if chance.random() < 0.3:
                flows.fail(running.pop(chance.randrange(len(running))), "on purpose")
            if chance.random() < 0.2:
                await trio.sleep(chance.random() * 0.1)
        await trio.sleep(2 * BATCH_SECONDS)
        exact = exact_rates([(flow.up, flow.down) for flow in running])
        for flow, rate in zip(running, exact, strict=True):
            assert flows.rate(flow) == pytest.approx(rate, rel=0.005)

    with_flows(main)


def test_fifty_peers_take_as_long_as_under_exact_sharing() -> None:
    """Each downloads several pieces at a time from others, one after the other. The same again
    with every rate set exactly at every change: each peer ends within 1 % of that."""
    peers, pieces, at_once = 50, 12, 3

    def plan() -> tuple[list[Link], list[Link], list[list[tuple[int, int]]]]:
        chance = random.Random(4)
        wanted = [
            [(chance.randrange(peers), chance.randrange(5, 20) * 10**6) for _ in range(pieces)]
            for _ in range(peers)
        ]
        return links(chance, peers), links(chance, peers), wanted

    async def fluid(flows: Flows) -> list[float]:
        ups, downs, wanted = plan()
        ended = [0.0] * peers

        async def fetch(me: int, queue: list[tuple[int, int]]) -> None:
            while queue:
                source, size = queue.pop(0)
                await transfer(flows, ups[source], downs[me], size)
            ended[me] = trio.current_time()

        async with trio.open_nursery() as nursery:
            for me in range(peers):
                for _ in range(at_once):
                    nursery.start_soon(fetch, me, wanted[me])
        return ended

    def exact() -> list[float]:
        ups, downs, wanted = plan()
        running: list[list[Any]] = []  # [me, uplink, bytes left]
        ended, now = [0.0] * peers, 0.0

        def begin(me: int) -> None:
            if wanted[me]:
                source, size = wanted[me].pop(0)
                running.append([me, ups[source], float(size)])
            ended[me] = now

        for me in range(peers):
            for _ in range(at_once):
                begin(me)
        while running:
            rates = exact_rates([(up, downs[me]) for me, up, _ in running])
            step = min(left / rate for (_, _, left), rate in zip(running, rates, strict=True))
            now += step
            for entry, rate in zip(running, rates, strict=True):
                entry[2] -= rate * step
            through = [entry for entry in running if entry[2] <= 1e-3]
            running[:] = [entry for entry in running if entry[2] > 1e-3]
            for entry in through:
                begin(entry[0])
        return ended

    for simulated, right in zip(with_flows(fluid), exact(), strict=True):
        assert simulated == pytest.approx(right, rel=0.01)


def test_a_paused_transfer_goes_on_where_it_was_and_a_failed_one_ends() -> None:
    async def main(flows: Flows) -> None:
        ended: list[tuple[float, str | None]] = []

        def note(flow: Flow) -> None:
            ended.append((trio.current_time(), flow.failure))

        flow = flows.start(Link(100.0), Link(1000.0), 1000, note)
        await trio.sleep(4)
        flows.pause(flow)
        await trio.sleep(50)
        assert flows.left_bytes(flow) == pytest.approx(600)
        flows.resume(flow)
        await trio.sleep(10)
        assert ended == [(pytest.approx(60), None)]  # type: ignore[comparison-overlap]
        other = flows.start(flow.up, flow.down, 1000, note)
        await trio.sleep(1)
        flows.fail(other, "the line was cut")
        flows.fail(other, "again")
        assert ended[1:] == [(pytest.approx(65), "the line was cut")]  # type: ignore[comparison-overlap]
        # Nobody is left on the line: the next one has it all.
        await transfer(flows, flow.up, flow.down, 1000)
        assert trio.current_time() == pytest.approx(75)

    with_flows(main)
