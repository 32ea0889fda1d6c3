"""A peer with an open gossip stream."""

from __future__ import annotations

from collections import OrderedDict, deque

import trio

from swarm.envelope import ENVELOPE_BYTES_MAX
from swarm.gossip.frames import Frame
from swarm.gossip.store import EVENTS_MAX
from swarm.transport import Stream


class Remembered(OrderedDict[bytes, None]):
    """The last digests that were added, oldest first, at most `most`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def add(self, digest: bytes) -> None:
        self[digest] = None
        self.move_to_end(digest)
        if len(self) > self._most:
            self.popitem(last=False)


class Neighbour:
    """A peer with an open gossip stream: what it is known to hold, and what it is owed."""

    def __init__(self, stream: Stream, *, opened: bool, range_: str, now: float) -> None:
        self.stream = stream
        self.peer = stream.peer
        self.opened = opened
        """By this side."""
        self.range = range_
        """Its range of public addresses (/24, IPv6 /48), or empty."""
        self.since = now
        """When it came, or its admission lapsed."""
        self.admitted_until = 0.0
        self.follows: frozenset[str] = frozenset()
        self.topics: frozenset[str] = frozenset()
        """Of those that it follows, the ones it is sent."""
        self.knows = Remembered(2 * EVENTS_MAX)
        self.invalid = 0
        self.clock: float | None = None
        """Its wall time less this world's clock, as it greeted."""
        self.scope = trio.CancelScope()
        self.outbox: deque[Frame] = deque()
        """Frames that go before anything below."""
        self.news = Remembered(EVENTS_MAX)
        """Announcements to send, in this order."""
        self.wanted = Remembered(EVENTS_MAX)
        """Announcements it asked for, in its order; sent when there is no news."""
        self.answer_bytes = ENVELOPE_BYTES_MAX
        """Of them it may have until the next tick, unless it is trusted: it may ask for the same
        again and again, and begin as many conversations."""
        self.offers = Remembered(EVENTS_MAX)
        """Announcements it offered and a trusted neighbour is about to bring."""
        self.writing = False
