"""How long work in a child process says that it advances, and learns that it was cancelled."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar

import trio

REPORT_SECONDS = 1.0
"""Reports in between are not sent: every patience is many times as long."""


class Reporter:
    """Passes on that one call advances."""

    def __init__(self, send: Callable[[], None]) -> None:
        """`send` is called in trio's thread."""
        self._send = send
        self._sent_at = time.monotonic()

    def report(self, *, cancellable: bool) -> None:
        """See `report` and `checkpoint`."""
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


current: ContextVar[Reporter | None] = ContextVar("current", default=None)
"""Of the call under way; trio's worker threads inherit it."""


def report() -> None:
    """Report that the current job advances: its caller's patience begins anew.

    Outside a child it does nothing.
    """
    reporter = current.get()
    if reporter is not None:
        reporter.report(cancellable=False)


def checkpoint() -> None:
    """Report, and raise `trio.Cancelled` if the caller has cancelled the job.

    For work that leaves nothing half changed. Cheap enough for every decoding step.
    """
    reporter = current.get()
    if reporter is not None:
        reporter.report(cancellable=True)
