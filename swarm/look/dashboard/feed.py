"""The snapshot's way to the pages: each page gets it whole once, then only what changed."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
import trio

from swarm.look.dashboard.snapshot import Snapshot, changes
from swarm.world.observable import Observable

PING_SECONDS = 15.0
"""Time without a change after which the page is told so: each notices that the other has gone."""

PING = b"event: still\ndata: {}\n\n"


class Feed:
    """The newest snapshot, encoded once for all pages."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._version = Observable(0)
        self._change = b""
        self._whole = b""
        """The snapshot as JSON, once a page has asked for it; empty before."""

    def publish(self, snapshot: Snapshot) -> None:
        """Replace the snapshot, and wake the pages if anything differs."""
        found = changes(self.snapshot, snapshot)
        self.snapshot = snapshot
        if found:
            self._whole = b""
            self._change = _event("change", msgspec.json.encode(found))
            self._version.set(self._version.value + 1)

    def whole(self) -> bytes:
        """The snapshot as JSON, of which all clients that take it share one copy."""
        self._whole = self._whole or msgspec.json.encode(self.snapshot)
        return self._whole

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events for one page, until it leaves.

        A page that takes them too slowly skips changes and gets the snapshot whole again, so
        nothing queues.
        """
        at = self._version.value
        yield _event("snapshot", self.whole())
        while True:
            with trio.move_on_after(PING_SECONDS):
                if self._version.value == at:
                    await self._version.wait_change()
            newest = self._version.value
            if newest == at:
                yield PING
            elif newest == at + 1:
                at = newest
                yield self._change
            else:
                at = newest
                yield _event("snapshot", self.whole())


def _event(name: str, data: bytes) -> bytes:
    # JSON has no line end inside: it escapes them in text.
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
