"""The announcer: decides what to announce to which neighbour, and when.

docs/protocol.md has the rules. News waits, so that a broadcast of hours costs some tens of frames.
The publisher of a large checkpoint announces others to each neighbour (super-seeding, BEP 16)."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import trio

from swarm.shardcast.have import claims as claiming
from swarm.shardcast.held import Change, Held
from swarm.shardcast.rarity import bits_of, draw
from swarm.shardcast.store import CheckpointStore
from swarm.wire.identity import PeerId
from swarm.world import World

SEEDING_END_SHARE = 1 / 64
"""When only this part of the pieces has not left yet, the publisher sends any."""

SEEDING_SHOWN = 8
"""Pieces announced to one neighbour, while super-seeding, that were never sent to anyone."""

BATCH_SECONDS = 0.25
"""Shortest time between two announcements of new pieces to a neighbour."""

PATIENCE = 0.25
"""News of a checkpoint waits for this part of the time since it began to arrive: a neighbour always
knows of most pieces, and a long broadcast costs few frames."""

BATCH_SECONDS_MAX = 60.0
"""Longest time that news waits."""

IDLE_SECONDS = 1.0
"""Longest time that news waits while the uplink is idle: nobody requests what was announced."""


@dataclass
class Mine:
    """The pieces that this peer holds of one checkpoint."""

    began: float
    bits: int
    shown: int = 0
    """Pieces announced to some neighbour while the checkpoint is super-seeded."""
    is_news_to_all: bool = False
    """Whether an announcement to every neighbour waits, which a further piece only joins."""


@dataclass
class Announced:
    """The announcements of one checkpoint to one neighbour."""

    at: float = -inf
    bits: int = 0
    complete: bool = False
    gone: bool = False


class Neighbour:
    """A peer that this one announces to."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.timer = trio.CancelScope()
        """Scope whose deadline is the time of the next frame."""
        self.due = inf
        self.news: dict[bytes, None] = {}
        """Checkpoints that may have news for this neighbour, in order."""
        self.announced: dict[bytes, Announced] = {}

    def speak_at(self, time: float) -> None:
        if time < self.due:
            self.due = self.timer.deadline = time


class Announcer:
    """The neighbours that this peer announces to, and the state of each."""

    def __init__(
        self,
        world: World,
        store: CheckpointStore,
        claims: claiming.Claims,
        tells: Callable[[], bool],
        idle: Callable[[], bool],
    ) -> None:
        """`tells()`: whether this peer announces anything at the moment; `idle()`: whether its
        uplink has room for more uploads."""
        self._world = world
        self._store = store
        self._claims = claims
        self.tells = tells
        self._idle = idle
        self.neighbours: dict[PeerId, Neighbour] = {}
        self._mine: dict[bytes, Mine] = {}
        store.watch(self._changed)

    def tell_all(self, neighbour: Neighbour) -> None:
        """Announce every checkpoint to a neighbour."""
        for mine in self._mine.values():
            mine.is_news_to_all = False
        for held in self._store.all()[-claiming.CLAIMS_MAX :]:
            neighbour.news[held.digest] = None
        if neighbour.news or neighbour.announced:
            neighbour.speak_at(-inf)

    def forget(self, neighbour: Neighbour) -> None:
        """Forget the announcements to a neighbour: pieces it did not fetch are shown to others."""
        for digest, announced in neighbour.announced.items():
            if digest in self._mine:
                self._mine[digest].shown &= ~announced.bits
        neighbour.announced.clear()

    def take(self, peer: PeerId, neighbour: Neighbour) -> list[claiming.Entry]:
        """Take the entries that bring this neighbour up to date."""
        now = self._world.now()
        entries: list[claiming.Entry] = []
        for digest in neighbour.news:
            if digest in self._mine:
                self._mine[digest].is_news_to_all = False
        if not self.tells():
            entries += [claiming.Gone(digest) for digest in neighbour.announced]
            self.forget(neighbour)
            neighbour.news.clear()
        for digest in neighbour.news:
            announced = neighbour.announced.setdefault(digest, Announced())
            entry = self._entry(peer, digest, announced)
            if entry is not None:
                entries.append(entry)
                announced.at = now
            if announced.gone:
                del neighbour.announced[digest]
        neighbour.news.clear()
        neighbour.due = inf
        return entries

    def _entry(self, peer: PeerId, digest: bytes, announced: Announced) -> claiming.Entry | None:
        held = self._store.blobs.named(digest)
        if held is None:
            announced.gone = True
            return claiming.Gone(digest) if announced.at > -inf else None
        if held.complete and not held.unsent:
            if announced.complete:
                return None
            announced.complete = True
            return claiming.Complete(digest)
        mine = self.mine_of(held)
        here = self._show(held, mine, announced) if held.unsent else mine.bits
        claim = self._claims.of(peer, digest)
        known = announced.bits | claim.bits if claim is not None else announced.bits
        news = here & ~known
        if not news and announced.at > -inf:
            return None
        announced.bits |= here
        if announced.at > -inf and news.bit_count() * 24 < news.bit_length():
            return claiming.Pieces(digest, claiming.indices_of(news), here.bit_count())
        return claiming.bitmap(digest, announced.bits)

    def _show(self, held: Held, mine: Mine, announced: Announced) -> int:
        """Choose pieces of a super-seeded checkpoint to announce to a neighbour, in addition to
        those announced to it before: pieces shown to no other neighbour, while there are any."""
        shown = announced.bits
        room = SEEDING_SHOWN - (shown & held.unsent).bit_count()
        while room > 0:
            fresh = held.unsent & ~mine.shown or held.unsent & ~shown
            if not fresh:
                break
            bit = 1 << draw(fresh, self._world.random)
            mine.shown |= bit
            shown |= bit
            room -= 1
        return shown

    def _changed(self, change: Change, held: Held, index: int) -> None:
        digest = held.digest
        now = self._world.now()
        if change is Change.REMOVED:
            self._mine.pop(digest, None)
        else:
            mine = self.mine_of(held)
            if change is Change.PIECE:
                mine.bits |= 1 << index
        if change is Change.LEFT:
            self._piece_left(held, index, now)
            return
        idle = change is Change.PIECE and self._idle()
        if change is Change.PIECE and not idle and mine.is_news_to_all:
            return
        is_news_to_all = True
        for peer, neighbour in self.neighbours.items():
            if change is Change.PIECE:
                if digest in neighbour.news and not idle:
                    continue
                claim = self._claims.of(peer, digest)
                if claim is not None and claim.has(index) and digest in neighbour.announced:
                    is_news_to_all = is_news_to_all and digest in neighbour.news
                    continue
                due = self._due(neighbour, digest, now, idle)
            else:
                due = now if change is Change.COMPLETE else now + BATCH_SECONDS
            neighbour.news[digest] = None
            neighbour.speak_at(due)
        if change is not Change.REMOVED:
            mine.is_news_to_all = is_news_to_all

    def _due(self, neighbour: Neighbour, digest: bytes, now: float, idle: bool) -> float:
        announced = neighbour.announced.get(digest)
        soonest = now + BATCH_SECONDS
        if announced is None:
            return soonest
        wait = min(PATIENCE * (now - self._mine[digest].began), BATCH_SECONDS_MAX)
        return max(soonest, announced.at + (min(wait, IDLE_SECONDS) if idle else wait))

    def mine_of(self, held: Held) -> Mine:
        """The pieces that this peer holds of a checkpoint."""
        mine = self._mine.get(held.digest)
        if mine is None:
            mine = self._mine[held.digest] = Mine(self._world.now(), bits_of(held.pieces))
        return mine

    def _piece_left(self, held: Held, index: int, now: float) -> None:
        """Note that a piece published here is sent for the first time.

        Announces more to those who were shown it, and to all once every piece was shown."""
        unsent = held.unsent
        if unsent and unsent.bit_count() <= len(held.pieces) * SEEDING_END_SHARE:
            # Sending a few of the last pieces twice is better than waiting for the neighbours
            # that they were shown to.
            self._store.end_seeding(held.digest)
            return
        bit = 1 << index if index >= 0 else 0
        all_shown = not unsent & ~self.mine_of(held).shown
        for neighbour in self.neighbours.values():
            announced = neighbour.announced.get(held.digest)
            if all_shown or (announced is not None and announced.bits & bit):
                neighbour.news[held.digest] = None
                neighbour.speak_at(now)
