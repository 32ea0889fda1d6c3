"""Searches of the DHT for peers, each of which costs tens of requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from swarm.wire.envelope import Envelope

PAUSE_SECONDS_MIN = 5.0
PAUSE_SECONDS_MAX = 60.0
"""Pause after a search in vain; each is twice the previous one. A peer that is down is wanted by
everybody."""

SEARCH_SECONDS_MAX = 30.0
"""Deadline of a search and of the connection that it leads to, usually seconds. Strangers that do
not answer, or name addresses that do not, would hold up all callers for minutes, though the peer
may have said meanwhile where it is."""

SEARCHES_MAX = 256
"""Peers whose searches are remembered; the least recent is forgotten."""


@dataclass(eq=False)
class Search:
    """What came of looking for one peer."""

    lock: trio.Lock = field(default_factory=trio.Lock)
    """Held by the one caller that looks; the others wait, and share what it finds."""
    addresses: Sequence[str] = ()
    """Those at which the peer was not found last time: it may be back at the same."""
    forgotten: Envelope | None = None
    """The record that had these addresses: a peer that cannot be reached is not named to others."""
    again_at: float = 0.0
    """When the DHT may be searched again."""
    failure: str = ""
    failed_at: float = 0.0
    """Why, and when, the peer was not found last time."""
    _pause_seconds: float = PAUSE_SECONDS_MIN

    def fail(self, reason: str, now: float) -> None:
        """Note why a caller has not found the peer, for those that wait for it."""
        self.failure, self.failed_at = reason, now

    def vain(self, now: float) -> None:
        """Note that the DHT was searched in vain."""
        self.again_at = now + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)
