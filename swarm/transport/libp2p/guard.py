"""The one place where what a stranger's connection or stream makes libp2p raise comes to an end."""

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
"""What libp2p raises when a connection or stream breaks, as any may."""


class Guard:
    """Runs what libp2p does with a connection or a stream, and lets no exception of it out.

    What failed is undone (a stream reset, a connection closed) and told as the event
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
        """Run `task` of `remote`, a "stream" or a "connection"; `undo` it should it raise.

        Raises nothing but cancellation.
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
        """Say that a fault of `remote` was contained, unless that was said often enough lately."""
        if self._events is not None:
            self._events.emit("transport.contained", what=what, remote=remote, reason=reason)


def innermost(error: BaseException) -> BaseException:
    """The first cause of nested exceptions and groups of them."""
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
