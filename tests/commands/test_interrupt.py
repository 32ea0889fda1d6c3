"""Ctrl-C and SIGTERM during a command's asynchronous work."""

from __future__ import annotations

import os
import signal

import pytest
import trio

from swarm.terminal.interrupt import run_until_interrupted


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_work_and_then_raises(which: signal.Signals) -> None:
    cleaned_up = []

    async def main() -> None:
        try:
            os.kill(os.getpid(), which)
            await trio.sleep_forever()
        finally:
            cleaned_up.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted(main)
    assert cleaned_up


def test_the_first_signal_asks_and_the_second_cancels() -> None:
    asked = []

    def ask() -> bool:
        asked.append(True)
        return len(asked) == 1

    async def main() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        await trio.sleep(0.05)
        return "finished"

    assert run_until_interrupted(main, ask_to_leave=ask) == "finished"
    assert len(asked) == 1

    async def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await trio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        await trio.sleep_forever()

    asked.clear()
    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted(twice, ask_to_leave=ask)
    assert len(asked) == 2


def test_a_signal_is_not_lost_in_code_that_ignores_exceptions() -> None:
    """Python's own handler would raise inside `__del__`, where exceptions are dropped."""

    class Interrupting:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            sum(range(1000))

    async def main() -> None:
        one = Interrupting()
        del one
        with trio.fail_after(10):
            await trio.sleep_forever()

    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted(main)


def test_results_and_errors_come_through_as_they_are() -> None:
    async def add(one: int, other: int) -> int:
        return one + other

    async def fail() -> None:
        raise ValueError("as it was")

    assert run_until_interrupted(add, 1, 2) == 3
    with pytest.raises(ValueError, match=r"^as it was$"):
        run_until_interrupted(fail)
