"""A trio loop in another thread, for services whose work outlives one call of a test."""

from __future__ import annotations

import queue
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import trio

from peers.validator.cases import Outcome
from swarm.jobs.validation import Grade, Inspect, InspectionService

T = TypeVar("T")
Ask = Callable[..., Any]


@contextmanager
def in_background(run: Callable[[], Awaitable[None]]) -> Iterator[Ask]:
    """Run `run` in a loop; yields a function that awaits async functions in the same loop."""
    started: queue.SimpleQueue[tuple[trio.lowlevel.TrioToken, trio.CancelScope]]
    started = queue.SimpleQueue()

    async def main() -> None:
        with trio.CancelScope() as scope:
            started.put((trio.lowlevel.current_trio_token(), scope))
            await run()

    def ask(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        return trio.from_thread.run(function, *arguments, trio_token=token)

    thread = threading.Thread(target=trio.run, args=[main])
    thread.start()
    token, scope = started.get()
    try:
        yield ask
    finally:
        token.run_sync_soon(scope.cancel)
        thread.join()


def inspect_whole(ask: Ask, inspector: InspectionService, job: Inspect, hung: str = "") -> Outcome:
    """Inspect a submission, grade it, and settle its rewards, as a validator does."""
    outcome = Outcome.of(ask(inspector.inspect, job))
    if not outcome.failed:
        graded = ask(inspector.grade, Grade(digest=job.digest, hung=hung))
        outcome.add(graded)
        if not outcome.failed and not graded.episodes:
            outcome.settle(graded)
    return outcome
