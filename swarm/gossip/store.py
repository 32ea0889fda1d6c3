"""Announcements held for neighbours that lack them."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from swarm.gossip.topics import LASTING, ROUTINE, RUN, STATES_FIRST, TOPICS
from swarm.wire.envelope import Envelope
from swarm.wire.messages import StateMessage
from swarm.world import World
from swarm.world.recent import Recent

EVENTS_MAX = 16_384
"""Events kept for neighbours that lack them: the messages of validators about 25 submissions per
second, until their verdicts expire, so that a trainer that was offline as long misses none. The
limit holds for lasting events too: trusted peers know older evictions from their logs."""

EVENTS_BYTES_MAX = 32 * 1024 * 1024
"""Bytes of these events: mostly under 1 KiB each; a long verdict has up to 64 KiB."""


class Kept(NamedTuple):
    raw: bytes
    topic: str
    expires_ms: int
    sender: str
    routine: bool


class Store:
    """The newest states of each sender, lasting events, and the latest of the other events."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._events: OrderedDict[bytes, Kept] = OrderedDict()
        """Oldest first."""
        self._events_bytes = 0
        self._lasting: Recent[bytes, Kept] = Recent(EVENTS_MAX)
        """Lasting events, oldest first."""
        self._states: dict[bytes, Kept] = {}
        self._newest: dict[tuple[int, str], bytes] = {}
        """Digest of the newest state by (kind, sender); kinds are indices in `STATES_FIRST`."""

    def __len__(self) -> int:
        """Number of events held, without lasting events and states."""
        return len(self._events)

    def get(self, digest: bytes) -> Kept | None:
        return self._events.get(digest) or self._lasting.get(digest) or self._states.get(digest)

    def without(self, digests: Iterable[bytes]) -> list[bytes]:
        """Those of some digests of which nothing is held."""
        events, lasting, states = self._events, self._lasting, self._states
        return [d for d in digests if not (d in states or d in events or d in lasting)]

    def add(self, envelope: Envelope) -> str:
        """Store an announcement; returns its topic."""
        digest, message = envelope.digest, envelope.message
        topic = TOPICS[type(message)]
        routine = isinstance(message, ROUTINE)
        kept = Kept(envelope.raw, topic, envelope.body.expires_ms, envelope.sender, routine)
        if isinstance(message, LASTING):
            self._lasting[digest] = kept
        elif isinstance(message, StateMessage):
            kind = (STATES_FIRST.index(type(message)), envelope.sender)
            self._states.pop(self._newest.get(kind, b""), None)
            self._newest[kind] = digest
            self._states[digest] = kept
        else:
            self._events[digest] = kept
            self._events_bytes += len(kept.raw)
            self.forget_oldest()
        return topic

    def forget_oldest(self) -> None:
        """Drop the oldest events while they have expired or exceed the limits."""
        wall_ms = int(self._world.wall_time() * 1000)
        while self._events and (
            len(self._events) > EVENTS_MAX
            or self._events_bytes > EVENTS_BYTES_MAX
            or next(iter(self._events.values())).expires_ms <= wall_ms
        ):
            _, forgotten = self._events.popitem(last=False)
            self._events_bytes -= len(forgotten.raw)

    def current(self) -> dict[str, list[bytes]]:
        """Digests of the announcements that a neighbour should hold, by topic.

        The newest states come first, then lasting events, then other events. Events are newest
        first, since the oldest are worth least."""
        wall_ms = int(self._world.wall_time() * 1000)
        digests = [digest for _, digest in sorted(self._newest.items())]
        digests += [*reversed(self._lasting), *reversed(self._events)]
        found: dict[str, list[bytes]] = {RUN: []}
        for digest in digests:
            kept = self.get(digest)
            assert kept is not None
            if kept.expires_ms > wall_ms:
                found.setdefault(kept.topic, []).append(digest)
        return found
