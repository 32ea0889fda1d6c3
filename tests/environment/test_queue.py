"""Calls of an environment peer's children are divided among the peers that ask."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from peers.environment.pool import TooBusy, _Call, _Queue


async def _never(service: Any) -> None:
    raise AssertionError


async def test_a_client_whose_calls_hang_delays_itself_more_than_others() -> None:
    """Two children; 64 calls of one client that take 30 s each, then 100 quick ones of two
    others."""
    ended: dict[str, list[float]] = {"hangs": [], "a": [], "b": []}

    async def run(call: _Call) -> bool:
        await trio.sleep(30.0 if call.client == "hangs" else 0.1)
        ended[call.client].append(trio.current_time())
        return True

    async def child(queue: _Queue) -> None:
        while True:
            await queue.run_next(run)

    queue = _Queue(4096, trio.current_time)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(64):
            queue.put(_Call("hangs", _never))
        for _ in range(2):
            nursery.start_soon(child, queue)
        await trio.sleep(1.0)
        for _ in range(50):
            queue.put(_Call("a", _never))
            queue.put(_Call("b", _never))
        await trio.sleep(70.0)
        nursery.cancel_scope.cancel()
    assert len(ended["a"]) == len(ended["b"]) == 50
    assert max(ended["a"] + ended["b"]) - began < 45.0
    assert abs(ended["a"][-1] - ended["b"][-1]) < 1.0


async def test_all_idle_children_take_calls() -> None:
    begun: list[str] = []

    async def run(call: _Call) -> bool:
        begun.append(call.client)
        await trio.sleep(30.0)
        return True

    queue = _Queue(4096, trio.current_time)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(queue.run_next, run)
        await trio.testing.wait_all_tasks_blocked()
        for client in "abc":
            queue.put(_Call(client, _never))
        await trio.testing.wait_all_tasks_blocked()
        assert begun == ["a", "b", "c"]


def test_too_many_calls_are_refused_and_dropped_ones_leave_room() -> None:
    queue = _Queue(2, lambda: 0.0)
    calls = [_Call("a", _never), _Call("b", _never), _Call("b", _never)]
    queue.put(calls[0])
    queue.put(calls[1])
    with pytest.raises(TooBusy):
        queue.put(calls[2])
    queue.drop(calls[1])
    queue.drop(calls[1])
    queue.put(calls[2])
