"""Ending a program's asynchronous work by Ctrl-C or SIGTERM."""

import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple

import trio

from swarm.world.tasks import open_guarded

ResultT = TypeVar("ResultT")
ArgumentsT = TypeVarTuple("ArgumentsT")

SILENT_SECONDS_MAX = 2.0
"""Time for which a command may work without a word."""

ASK_TO_END = (signal.SIGINT, signal.SIGTERM)
"""Signals after which a program ends in good order. All others have their usual effect."""


def run_until_interrupted(
    main: Callable[[*ArgumentsT], Awaitable[ResultT]],
    *arguments: *ArgumentsT,
    on_interrupt: Callable[[], None] = lambda: None,
    ask_to_leave: Callable[[], bool] = lambda: False,
    waiting: str = "",
) -> ResultT:
    """Run `trio.run(main, *arguments)` and cancel it on the first SIGINT or SIGTERM.

    Each signal calls `ask_to_leave`, before anything is cancelled: if it returns True, `main` ends
    by itself, and the next signal cancels it. `waiting`: what is said if it takes longer than
    `SILENT_SECONDS_MAX`.

    Raises `KeyboardInterrupt` once everything has been cancelled, unless `main` ended first.

    Python's own handler would raise `KeyboardInterrupt` in the code that happens to run. Some code
    (a destructor, a library's callback) ignores exceptions, and the signal would be lost. Python's
    handler is restored with the cancellation, so that a further signal ends a slow one."""

    scope = trio.CancelScope()

    async def listen(task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(*ASK_TO_END) as signals:
            task_status.started()
            async for _ in signals:
                if not ask_to_leave():
                    break
        on_interrupt()
        scope.cancel()

    async def say() -> None:
        await trio.sleep(SILENT_SECONDS_MAX)
        print(f"{waiting}…", file=sys.stderr, flush=True)

    async def interruptible() -> ResultT:
        results: list[ResultT] = []
        async with open_guarded() as guarded:
            await guarded.nursery.start(listen)
            if waiting:
                guarded.nursery.start_soon(say)
            with scope:
                results.append(await main(*arguments))
            guarded.nursery.cancel_scope.cancel()
        if not results:
            raise KeyboardInterrupt
        return results[0]

    return trio.run(interruptible)
