"""A peer with an open gossip stream."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

import trio

from swarm.gossip.frames import Frame
from swarm.gossip.store import EVENTS_MAX
from swarm.transport import Stream
from swarm.wire.envelope import ENVELOPE_BYTES_MAX

PUSHED_MAX = 64
"""A few seconds of routine announcements: copies cross within a round trip."""

KNOWN_SWEPT_MIN = 1024
"""Fewer known digests are not swept: 0.2 MB per neighbour."""


class Remembered(OrderedDict[bytes, None]):
    """The last added digests, oldest first, at most `most`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def add(self, digest: bytes) -> None:
        self[digest] = None
        self.move_to_end(digest)
        if len(self) > self._most:
            self.popitem(last=False)


class Neighbour:
    """A peer with an open gossip stream: what it is known to hold, and what to send it."""

    def __init__(self, stream: Stream, *, opened: bool, range_: str, now: float) -> None:
        self.stream = stream
        self.peer = stream.peer
        self.opened = opened
        """Whether this side opened the stream."""
        self.range = range_
        """Its range of public addresses (/24, IPv6 /48), or empty."""
        self.since = now
        """When the stream opened, or its admission lapsed."""
        self.admitted_until = 0.0
        self.follows: frozenset[str] = frozenset()
        self.topics: frozenset[str] = frozenset()
        """The topics it follows that it is allowed to get."""
        self.knows = Remembered(2 * EVENTS_MAX)
        self._sweep_at = KNOWN_SWEPT_MIN
        """Number of known digests at which those that are no longer kept are next removed."""
        self.pushed = Remembered(PUSHED_MAX)
        """The last routine announcements pushed to it."""
        self.supplied_until: dict[str, float] = {}
        """Senders whose routine announcements it gets from others as early as from this peer, and
        until when that is assumed."""
        self.invalid = 0
        self.clock: float | None = None
        """Its wall time minus this world's clock when it greeted, in seconds."""
        self.scope = trio.CancelScope()
        self.outbox: deque[Frame] = deque()
        """Frames to send before `news` and `wanted`."""
        self.news = Remembered(EVENTS_MAX)
        """Announcements to send, in this order."""
        self.wanted = Remembered(EVENTS_MAX)
        """Announcements it asked for, in its order; sent when there is no news."""
        self.answer_bytes = ENVELOPE_BYTES_MAX
        """Bytes of `wanted` that it still gets before the next tick, unless it is trusted. Without
        this limit it could ask for the same again and again, and start new conversations for it."""
        self.offers = Remembered(EVENTS_MAX)
        """Announcements it offered that were just requested from a trusted neighbour."""
        self.writing = False

    def sweep(self, kept: Callable[[bytes], object | None]) -> None:
        """Forget that it knows announcements that `kept` finds no more: they are never sent again.

        Only after as many were added as were left, so a digest costs constant time.
        """
        if len(self.knows) > self._sweep_at:
            for digest in [digest for digest in self.knows if kept(digest) is None]:
                del self.knows[digest]
            self._sweep_at = max(KNOWN_SWEPT_MIN, 2 * len(self.knows))
