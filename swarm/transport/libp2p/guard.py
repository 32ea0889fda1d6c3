"""Containment of the exceptions that a stranger's connection or stream causes in libp2p."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from libp2p.exceptions import BaseLibp2pError

from swarm.errors import leaf_errors
from swarm.events import Events, Rationed
from swarm.transport import limits

log = logging.getLogger(__name__)

BROKEN = (BaseLibp2pError, OSError, trio.BrokenResourceError, trio.ClosedResourceError)
"""What libp2p raises when a connection or stream breaks. Any may break; that is no fault."""


class Guard:
    """Runs libp2p's tasks for connections and streams, and lets none of their exceptions out.

    A stream that failed is reset, a connection is closed. The fault is reported as the event
    `transport.contained`, at most `STRANGERS_EVENTS_PER_MINUTE` times a minute.
    """

    def __init__(self, events: Events | None) -> None:
        self._events = Rationed(events) if events is not None else None

    async def run(
        self,
        what: str,
        remote: str,
        task: Callable[[], Awaitable[Any]],
        undo: Callable[[], Awaitable[Any]],
    ) -> None:
        """Run a task for `remote`, and `undo` if it raises. Raises nothing but cancellation.

        `what` is "stream" or "connection".
        """
        try:
            await task()
        except* Exception as errors:
            log.debug("%s of %s", what, remote, exc_info=errors)
            if not all(isinstance(error, BROKEN) for error in leaf_errors(errors)):
                self.tell(what, remote, reason_of(errors))
            with (
                contextlib.suppress(Exception),
                trio.move_on_after(limits.STREAM_WRITE_SECONDS, shield=True),
            ):
                await undo()

    def tell(self, what: str, remote: str, reason: str) -> None:
        """Report that a fault of `remote` was contained, at a limited rate."""
        if self._events is not None:
            self._events.emit("transport.contained", what=what, remote=remote, reason=reason)


def innermost(error: BaseException) -> BaseException:
    """The innermost cause of an exception; of a group, its first exception."""
    while True:
        error = leaf_errors(error)[0]
        if error.__cause__ is None:
            return error
        error = error.__cause__


def reason_of(error: BaseException) -> str:
    """The innermost cause of libp2p's nested exceptions, in one line."""
    error = innermost(error)
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:200]
