"""Gossip slots: which peers get one, and which side starts a conversation.

A `Neighbour` is a peer with an open gossip stream."""

import math
from collections import Counter, deque
from collections.abc import Callable

import trio

from swarm.gossip.store import EVENTS_MAX, Store
from swarm.gossip.topics import RUN, Frame
from swarm.transport import Stream, Transport
from swarm.wire.envelope import BAN_SECONDS, ENVELOPE_BYTES_MAX
from swarm.wire.identity import PeerId
from swarm.world import World
from swarm.world.recent import Recent

PUSHED_MAX = 64
"""A few seconds of routine announcements: copies cross within a round trip."""

KNOWN_SWEPT_MIN = 1024
"""Fewer known digests are not swept: 0.2 MB per neighbour."""


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
        self.knows: Recent[bytes, None] = Recent(2 * EVENTS_MAX)
        self._sweep_at = KNOWN_SWEPT_MIN
        """Number of known digests at which those that are no longer kept are next removed."""
        self.pushed: Recent[bytes, None] = Recent(PUSHED_MAX)
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
        self.news: Recent[bytes, None] = Recent(EVENTS_MAX)
        """Announcements to send, in this order."""
        self.wanted: Recent[bytes, None] = Recent(EVENTS_MAX)
        """Announcements it asked for, in its order; sent when there is no news."""
        self.answer_bytes = ENVELOPE_BYTES_MAX
        """Bytes of `wanted` that it still gets before the next tick, unless it is trusted. Without
        this limit it could ask for the same again and again, and start new conversations for it."""
        self.offers: Recent[bytes, None] = Recent(EVENTS_MAX)
        """Announcements it offered that were just requested from a trusted neighbour."""
        self.writing = False

    def sweep(self, store: Store) -> None:
        """Forget that it knows announcements that are not stored: they are never sent again.

        Only after as many were added as were left, so a digest costs constant time."""
        if len(self.knows) > self._sweep_at:
            for digest in store.without(self.knows):
                del self.knows[digest]
            self._sweep_at = max(KNOWN_SWEPT_MIN, 2 * len(self.knows))


NEIGHBOURS_MAX = 32
"""Neighbours a peer gossips with; further connections only serve other protocols."""

NEIGHBOURS_WANTED = 8
"""A peer with fewer neighbours dials more of the peers that it knows of."""

STARTED_UNTIL = 16
"""A peer with as many admitted neighbours starts no more conversations, unless it is trusted; it
accepts others', up to `NEIGHBOURS_MAX`. With all slots filled, newcomers would be refused
everywhere."""

OPENING_MAX = 8
"""Attempts to start a conversation at a time. Of many peers that join at once, most refuse one
another, so without this bound greetings would be most of everybody's work."""

TRUSTED_TAKE = 16
"""Slots that trusted peers may take from others; the rest stays for workers."""

STRANGERS_MAX = 8
"""Slots for peers that have not shown an admission: enough for newcomers, which need one for
seconds, and few enough that a crowd of them delays nothing."""

STRANGERS_PER_RANGE_MAX = 2

STRANGER_SECONDS = 60.0
"""A peer that is not admitted within this time loses its slot, and gets none for `FULL_SECONDS`."""

YIELD_SECONDS = 3.0
"""Of two connected peers, the one whose id sorts first starts the conversation. The other one, if
admitted, does after this long: the first may have had no slot for a stranger."""

REFUSALS_MAX = 4096
"""Refusals of peers remembered, and strangers whose time is over (each kind)."""

FULL_SECONDS = 600.0
"""Additional wait before a peer with enough neighbours asks a full peer again."""

RETRY_SECONDS = 1.0
"""Pause after the first refusal; doubled each time, up to `BAN_SECONDS`."""

LASTING_SECONDS = 60.0
"""After a conversation longer than this, the refusals before it no longer count."""

STRANGER, ADMITTED, TRUSTED = range(3)
"""Ranks of neighbours, in ascending order."""


class Refusal:
    """A peer's refusal to talk."""

    def __init__(self) -> None:
        self.times = 0
        self.retry_at = 0.0
        self.full = False
        """The peer has enough neighbours: it would refuse after a new connection, too."""


class Slots:
    """The neighbours of one peer, at most `NEIGHBOURS_MAX`, and the candidates for a slot."""

    def __init__(self, transport: Transport, world: World, trusts: Callable[[str], bool]) -> None:
        self.trusts = trusts
        self.neighbours: dict[PeerId, Neighbour] = {}
        self.greeting: dict[PeerId, Neighbour] = {}
        """Peers that have not sent `hello` yet; then their rank decides whether they get a slot."""
        self.opening: set[PeerId] = set()
        """Peers that this one has asked for a conversation, until they greet or refuse."""
        self.admitted = False
        """Whether this peer has an admission to show."""
        self.open_at = 0.0
        """When to look for peers to start a conversation with."""
        self._transport = transport
        self._world = world
        self._refusals: Recent[PeerId, Refusal] = Recent(REFUSALS_MAX)
        """Peers that refused to talk, or that have to start the conversation."""
        self._spent: Recent[PeerId, float] = Recent(REFUSALS_MAX)
        """Strangers whose time is over, and until when they get no slot."""

    def rank(self, neighbour: Neighbour) -> int:
        """The rank of a neighbour; a peer without a slot may take one from a lower rank."""
        if self.trusts(neighbour.peer):
            return TRUSTED
        return ADMITTED if neighbour.admitted_until > self._world.now() else STRANGER

    def members(self) -> list[PeerId]:
        """Neighbours that are trusted or admitted, sorted."""
        return sorted(n.peer for n in self.neighbours.values() if self._is_member(n))

    def _is_member(self, neighbour: Neighbour) -> bool:
        return neighbour.admitted_until > self._world.now() or self.trusts(neighbour.peer)

    def set_admitted(self) -> None:
        """Note that this peer is admitted now: peers that had no slot for it may have one now."""
        self.admitted = True
        for refusal in self._refusals.values():
            refusal.full = False
            refusal.retry_at = 0.0
        self.open_at = 0.0

    # --- slots -------------------------------------------------------------------------------

    def may_have(self, newcomer: Neighbour) -> bool:
        """Whether a peer that has just greeted gets a slot.

        If none is free, a neighbour of lower rank loses its slot, or an admitted neighbour from an
        address range with at least two more neighbours than the newcomer's."""
        ranks = {neighbour.peer: self.rank(neighbour) for neighbour in self.neighbours.values()}
        rank, crowd = self.rank(newcomer), Counter(n.range for n in self.neighbours.values())
        # Even while slots are free: identities cost nothing, and each neighbour costs work.
        if rank == STRANGER:
            strangers = [n for n in self.neighbours.values() if ranks[n.peer] == STRANGER]
            near = sum(n.range == newcomer.range != "" for n in strangers)
            if (
                len(strangers) >= STRANGERS_MAX
                or near >= STRANGERS_PER_RANGE_MAX
                or self._spent.get(newcomer.peer, 0.0) > self._world.now()
            ):
                return False
        if not self.is_full():
            return True
        others = [n for n in self.neighbours.values() if ranks[n.peer] < TRUSTED]
        if rank == STRANGER or not others:
            return False
        # Of the lowest rank, the newest of the most crowded range: whoever was here before an
        # attacker came stays.
        least = min(others, key=lambda n: (ranks[n.peer], -crowd[n.range], -n.since))
        # More than one apart: otherwise the range that gave the slot would then be the smaller one
        # and take it back, for ever.
        if rank == ADMITTED:
            takes = ranks[least.peer] == STRANGER or crowd[least.range] > crowd[newcomer.range] + 1
        else:
            trusted = len(ranks) - len(others)
            takes = ranks[least.peer] == STRANGER or trusted < TRUSTED_TAKE
        if takes:
            self.leave(least)
        return takes

    def take(self, neighbour: Neighbour) -> None:
        """Give a slot to a peer that has greeted."""
        del self.greeting[neighbour.peer]
        self.neighbours[neighbour.peer] = neighbour
        refusal = self._refusals.get(neighbour.peer)
        if refusal is not None:
            refusal.full = False
        self.opened(neighbour.peer)

    def is_full(self) -> bool:
        return len(self.neighbours) >= NEIGHBOURS_MAX

    def leave(self, neighbour: Neighbour) -> None:
        """End a conversation. The next one with this peer waits as after a refusal, unless this
        one has lasted: a peer that takes the slot back at once would be asked every second."""
        if self._world.now() - neighbour.since > LASTING_SECONDS:
            self._refusals.pop(neighbour.peer, None)
        for among in (self.neighbours, self.greeting):
            if among.get(neighbour.peer) is neighbour:
                del among[neighbour.peer]
        neighbour.scope.cancel()
        self.open_at = 0.0  # a slot is free again

    def part_with_strangers(self) -> None:
        """End conversations with peers that stay strangers for too long: they bring nothing."""
        now = self._world.now()
        for neighbour in list(self.neighbours.values()):
            if self._is_member(neighbour):
                continue
            if 0 < neighbour.admitted_until <= now:
                neighbour.since, neighbour.admitted_until = now, 0.0
                neighbour.topics = neighbour.follows & {RUN}
            elif now - neighbour.since > STRANGER_SECONDS:
                self._spent[neighbour.peer] = now + FULL_SECONDS
                self.leave(neighbour)

    # --- which side starts -------------------------------------------------------------------

    def meet(self, peer: PeerId) -> None:
        """Decide which side starts the conversation with a peer that was just connected."""
        refusal = self._refusals.get(peer)
        if refusal is not None and not refusal.full:
            del self._refusals[peer]
        if self._transport.peer_id > peer:
            self._refusal(peer).retry_at = self._world.now() + YIELD_SECONDS

    def _refusal(self, peer: PeerId) -> Refusal:
        return self._refusals.setdefault(peer, Refusal())

    def lacks(self) -> int:
        """How many more conversations with untrusted peers to start now."""
        trusted = self.trusts(self._transport.peer_id)
        members = sum(self._is_member(each) for each in self.neighbours.values())
        wanted = (NEIGHBOURS_MAX if trusted else STARTED_UNTIL) - members
        return min(wanted, OPENING_MAX) - len(self.opening)

    def opens_at(self, peer: PeerId) -> float:
        """When this side may start a conversation, if it lacks any; infinity while it may not."""
        yields = self._transport.peer_id > peer
        if (
            peer in self.neighbours
            or peer in self.greeting
            or peer in self.opening
            or (yields and not self.admitted and not self.trusts(self._transport.peer_id))
        ):
            return math.inf
        refusal = self._refusals.get(peer)
        if refusal is None:
            return 0.0
        return refusal.retry_at + (FULL_SECONDS if self._lets_be(peer, refusal) else 0.0)

    def _lets_be(self, peer: PeerId, refusal: Refusal) -> bool:
        """Whether a peer that had no slot is left alone for a while. Trusted peers ask one another
        again soon; if everybody asked them, each would refuse all peers of the run each minute."""
        enough = len(self.neighbours) >= NEIGHBOURS_WANTED
        both_trusted = self.trusts(peer) and self.trusts(self._transport.peer_id)
        return refusal.full and enough and not both_trusted

    def is_refused_by(self, peer: PeerId) -> bool:
        """Whether a peer had no slot for this one so lately that connecting to it is no use."""
        refusal = self._refusals.get(peer)
        if refusal is None or not self._lets_be(peer, refusal):
            return False
        return refusal.retry_at + FULL_SECONDS > self._world.now()

    def may_open(self, peer: PeerId) -> bool:
        due = self.opens_at(peer) <= self._world.now()
        return due and (self.trusts(peer) or self.lacks() > 0)

    def attempt(self, peer: PeerId) -> Refusal:
        """Count an attempt to start a conversation as refused until the peer greets."""
        self.opening.add(peer)
        refusal = self._refusal(peer)
        pause = min(BAN_SECONDS, RETRY_SECONDS * 2**refusal.times)
        refusal.times = min(refusal.times + 1, 10)
        refusal.retry_at = self._world.now() + pause
        self.open_at = min(self.open_at, refusal.retry_at)
        return refusal

    def opened(self, peer: PeerId) -> None:
        """Note that an attempt is over: another peer may be asked."""
        if peer in self.opening:
            self.opening.remove(peer)
            self.open_at = 0.0
