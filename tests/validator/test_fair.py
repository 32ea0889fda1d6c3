"""Lanes are shared fairly: whoever is slow delays himself."""

from __future__ import annotations

from collections import Counter
from functools import partial

import trio
from hypothesis import given
from hypothesis import strategies as st

from peers.validator.queue import FairQueue
from simnet.clock import run_virtual

RUNNER = partial(run_virtual, seed=1, limit_seconds=2000)


def judge(
    durations: dict[str, float], *, lanes: int, seconds: float, backlog: int = 1000
) -> Counter[str]:
    """How many items of each client are done after `seconds`, if all clients always have some."""
    done: Counter[str] = Counter()
    in_hand: set[str] = set()

    async def main() -> None:
        queue: FairQueue[tuple[str, int]] = FairQueue(lanes)
        for client in durations:
            for number in range(backlog):
                queue.put(client, (client, number))

        async def lane(index: int) -> None:
            while True:
                client, number = await queue.next(index)
                assert client not in in_hand and number == done[client]
                in_hand.add(client)
                await trio.sleep(durations[client])
                in_hand.discard(client)
                done[client] += 1
                queue.done(client, durations[client])

        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for index in range(lanes):
                    nursery.start_soon(lane, index)

    run_virtual(main, seed=1, limit_seconds=2 * seconds)
    return done


def test_files_that_hold_the_reader_for_30_seconds_delay_their_own_workers_only() -> None:
    honest = {f"honest-{number}": 0.5 for number in range(4)}
    alone = judge(honest, lanes=2, seconds=600)
    beside = judge({**honest, **{f"bomb-{n}": 30.0 for n in range(16)}}, lanes=2, seconds=1200)
    rate = sum(beside[each] for each in honest) / 1200
    assert rate > 0.4 * sum(alone.values()) / 600, "the last lane is never theirs"
    assert min(beside[each] for each in honest) > 0.8 * max(beside[each] for each in honest)


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.5, 1.0, 2.0]), min_size=2),
    st.integers(1, 3),
)
def test_clients_that_always_have_work_use_the_same_seconds(
    durations: dict[str, float], lanes: int
) -> None:
    if len(durations) <= lanes:
        return
    done = judge(durations, lanes=lanes, seconds=100)
    used = [done[client] * seconds for client, seconds in durations.items()]
    assert max(used) - min(used) <= 2 * max(durations.values()) + 2


async def test_the_first_idle_lane_gets_the_next_item() -> None:
    queue: FairQueue[str] = FairQueue(2)
    taken: list[int] = []

    async def lane(index: int) -> None:
        while True:
            await queue.next(index)
            taken.append(index)
            queue.done("a", 0.0)
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        for index in (1, 0):
            nursery.start_soon(lane, index)
        for _ in range(5):
            await trio.sleep(1)
            queue.put("a", "item")
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert taken == [0] * 5


async def test_a_clients_next_item_is_taken_although_the_first_lane_idles() -> None:
    """The lane that finishes leaves the item to the first idle lane, which has to be woken."""
    taken: list[str] = []
    queue: FairQueue[str] = FairQueue(2)

    async def lane(index: int, seconds: float) -> None:
        while True:
            item = await queue.next(index)
            taken.append(item)
            await trio.sleep(seconds)
            queue.done(item[0], seconds)

    for item in ("a1", "b1", "b2", "b3"):
        queue.put(item[0], item)
    with trio.move_on_after(100):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lane, 0, 1.0)
            nursery.start_soon(lane, 1, 3.0)
    assert sorted(taken) == ["a1", "b1", "b2", "b3"]


async def test_new_identities_leave_a_lane_free_from_their_first_item_on() -> None:
    """However many there are: they were never slow before, and cost nothing to make."""
    queue: FairQueue[str] = FairQueue(3)
    for number in range(8):
        queue.put(f"new-{number}", "long", is_proven=False)
    assert [await queue.next(lane) for lane in (0, 1)] == ["long", "long"]
    with trio.move_on_after(1000) as idle:
        await queue.next(2)
    assert idle.cancelled_caught
    queue.put("old", "short")
    assert await queue.next(2) == "short"


async def test_who_hands_in_a_fake_comes_last_and_leaves_new_identities_a_lane() -> None:
    queue: FairQueue[str] = FairQueue(3)
    for client in ("fake-1", "fake-2", "new"):
        queue.put(client, client, is_proven=False)
    assert await queue.next() == "fake-1"
    assert queue.doubt("fake-1", "fake-1", doubted=True), "it is put down once"
    queue.done("fake-1", 0.1)
    assert await queue.next(0) == "fake-2"
    assert queue.doubt("fake-2", "fake-2", doubted=True)
    queue.done("fake-2", 0.1)
    assert [await queue.next(lane) for lane in (0, 1)] == ["new", "fake-1"]
    assert not queue.doubt("fake-1", "fake-1", doubted=True)
    queue.done("new", 1.0)
    with trio.move_on_after(1000) as idle:
        await queue.next(0)
    assert idle.cancelled_caught, "two fakes would leave no lane to new identities"
    queue.put("new", "again", is_proven=False)
    assert await queue.next(0) == "again"
    queue.doubt("fake-1", "fake-1", doubted=False)
    queue.done("fake-1", 1.0)
    queue.done("new", 1.0)
    assert await queue.next(0) == "fake-2"
