"""Virtual time: it jumps, it repeats, and it says when nothing can happen."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import trio
import trio.testing

from simnet.clock import Timeline, run_virtual


async def race(tasks: int = 30) -> list[int]:
    """The order in which tasks get their turn: all are ready at once."""
    order: list[int] = []
    start = trio.Event()

    async def take_part(number: int) -> None:
        await start.wait()
        for _ in range(3):
            order.append(number)
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        for number in range(tasks):
            nursery.start_soon(take_part, number)
        await trio.testing.wait_all_tasks_blocked()
        start.set()
    return order


def test_a_thousand_years_pass_at_once() -> None:
    async def main() -> float:
        await trio.sleep_until(3e10)
        return trio.current_time()

    before = time.monotonic()
    assert run_virtual(main, seed=1) == 3e10
    assert time.monotonic() - before < 5


def test_one_seed_is_one_order_and_another_seed_another() -> None:
    first = run_virtual(race, seed=1)
    ballast = [object() for _ in range(1000)]  # other memory addresses, other counters
    assert run_virtual(race, seed=1) == first
    assert run_virtual(race, seed=2) != first
    assert len(ballast) == 1000


def test_the_order_does_not_depend_on_the_process() -> None:
    program = (
        "from tests.simnet.test_clock import race\n"
        "from simnet.clock import run_virtual\n"
        "print(run_virtual(race, seed=5))"
    )
    orders = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True, capture_output=True, text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }  # fmt: skip
    assert orders == {f"{run_virtual(race, seed=5)}\n"}


def test_a_program_that_goes_on_too_long_is_stopped() -> None:
    with pytest.raises(trio.TooSlowError):
        run_virtual(trio.sleep, 100, seed=1, limit_seconds=50)


def test_ordinary_runs_are_left_as_they_were() -> None:
    before = trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING  # hypothesis may have turned it on
    run_virtual(trio.sleep, 1, seed=1)
    assert trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING is before


def test_what_is_due_happens_between_the_turns_of_tasks() -> None:
    async def main() -> list[tuple[float, str]]:
        timeline, seen = Timeline(), []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(timeline.run)
            await trio.testing.wait_all_tasks_blocked()
            woken = trio.Event()

            def note(what: str) -> None:
                seen.append((trio.current_time(), what))

            timeline.at_link(2.0, 7, 2, note, "second of link 7")
            timeline.at_link(2.0, 7, 1, note, "first of link 7")
            timeline.at(2.0, "named", 1, note, "named")
            timeline.at(3.0, "named", 2, woken.set)
            await trio.testing.wait_all_tasks_blocked()  # time stands still for it
            note("begun")
            await woken.wait()
            note("woken")
            nursery.cancel_scope.cancel()
        return seen

    assert run_virtual(main, seed=1) == [
        (0.0, "begun"),
        (2.0, "named"),
        (2.0, "first of link 7"),
        (2.0, "second of link 7"),
        (3.0, "woken"),
    ]


def test_an_action_that_fails_ends_the_simulation_with_its_error() -> None:
    async def main() -> None:
        timeline = Timeline()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(timeline.run)
            timeline.at(1.0, "broken", 1, lambda: 1 // 0)
            await trio.sleep(5)

    with pytest.raises(ZeroDivisionError):
        run_virtual(main, seed=1)
