"""Progress reports and cancellation of long work in a child process."""

import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar

import trio

REPORT_SECONDS = 1.0
"""Shortest time between two reports: the patience of every job is many times as long."""


HUNG_STATUS = 75
"""Exit status of a child that ends itself because a call does not return. The last line that it
wrote to stderr is a sentence about that call."""


class Reporter:
    """Reports the progress of one call to the child's owner."""

    def __init__(self, send: Callable[[], None]) -> None:
        """Made in trio's thread, where `send` is called."""
        self._send = send
        self._token = trio.lowlevel.current_trio_token()
        self._sent_at = time.monotonic()

    def report(self, *, cancellable: bool) -> None:
        in_thread = not trio.lowlevel.in_trio_run()
        if in_thread and cancellable:
            trio.from_thread.check_cancelled()
        now = time.monotonic()
        if now - self._sent_at >= REPORT_SECONDS:
            self._sent_at = now
            if in_thread:
                trio.from_thread.run_sync(self._send)
            else:
                self._send()

    def report_from_any_thread(self) -> None:
        """Report progress on behalf of a thread that cannot, because it is in a long call."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._send)


current: ContextVar[Reporter | None] = ContextVar("current", default=None)
"""The reporter of the running call; trio's worker threads inherit it."""


def report() -> None:
    """The current job is alive: its caller's patience starts again. No effect outside a child."""
    reporter = current.get()
    if reporter is not None:
        reporter.report(cancellable=False)


def checkpoint() -> None:
    """Report, and raise `trio.Cancelled` if the caller has cancelled the job.

    For work that may be stopped at this point. Cheap enough for every decoding step."""
    reporter = current.get()
    if reporter is not None:
        reporter.report(cancellable=True)
