"""Who has what: neighbours tell each other which pieces they hold.

Protocol `/swarm/have/1.0.0`, framing SWARM, one stream each way; its receiver only listens. A
frame is a msgpack array of tagged entries, each about one checkpoint, named by its manifest's
digest:

    ["bitmap", manifest, bytes]    all that is there: bit i % 8 of byte i / 8 is piece i
    ["pieces", manifest, indices, count]  more pieces, and how many there are in all
    ["complete", manifest]         all of it; sent at once
    ["gone", manifest]             no longer

News waits for a quarter of the time since the checkpoint began to arrive (at least 250 ms, at most
a minute), or 250 ms when the neighbour lacks only few pieces: a neighbour always knows of most of
what is here, and a broadcast of hours costs some tens of frames. Nobody is told of pieces that he
claims himself. A peer looks for eight neighbours, for sixteen while it is late, for more while its
uplink is not used, and announces to those that chose it as well.

Whoever published a large checkpoint shows each neighbour other pieces, a few at a time, until
each has left it once (super-seeding, BitTorrent BEP 16).

What a peer claims only decides whom to ask for what, so a lie costs one refused request, and the
liar its standing as a source.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from math import inf
from typing import Annotated, TypeAlias

import msgspec
import trio
from msgspec import Meta

from swarm import defaults
from swarm.errors import DECODE_ERRORS
from swarm.events import Events
from swarm.identity import PeerId
from swarm.messages import Digest
from swarm.rates import TokenBucket
from swarm.shardcast.held import Change, Held
from swarm.shardcast.rarity import Rarity, bits_of, draw
from swarm.shardcast.store import CheckpointStore
from swarm.shardcast.uploads import Uploads
from swarm.transport import Stream, StreamError, Transport
from swarm.world import World

PROTOCOL = "/swarm/have/1.0.0"

_BITMAP_BYTES_MAX = defaults.CHECKPOINT_PIECES_MAX // 8
_INDICES_MAX = 4096
"""Pieces named in one entry; more are said with a bitmap."""
_FRAME_BYTES_MAX = 512 * 1024
_Index = Annotated[int, Meta(ge=0, lt=defaults.CHECKPOINT_PIECES_MAX)]


class _Bitmap(msgspec.Struct, array_like=True, frozen=True, tag="bitmap"):
    manifest: Digest
    pieces: Annotated[bytes, Meta(max_length=_BITMAP_BYTES_MAX)]


class _Pieces(msgspec.Struct, array_like=True, frozen=True, tag="pieces"):
    manifest: Digest
    indices: Annotated[list[_Index], Meta(max_length=_INDICES_MAX)]
    count: Annotated[int, Meta(ge=0, le=defaults.CHECKPOINT_PIECES_MAX)]
    """Of all pieces that are there: those that the neighbour claims himself are never named."""


class _Complete(msgspec.Struct, array_like=True, frozen=True, tag="complete"):
    manifest: Digest


class _Gone(msgspec.Struct, array_like=True, frozen=True, tag="gone"):
    manifest: Digest


Meet = Callable[[], Awaitable[PeerId | None]]
"""Connects to one more peer that may want checkpoints; None when there is nobody."""

_Entry: TypeAlias = _Bitmap | _Pieces | _Complete | _Gone
_Frame: TypeAlias = Annotated[list[_Entry], Meta(max_length=defaults.HAVE_CHECKPOINTS_MAX)]

_decoder: msgspec.msgpack.Decoder[list[_Entry]] = msgspec.msgpack.Decoder(_Frame)
_encoder = msgspec.msgpack.Encoder()


class Claim:
    """What one peer says it holds of one checkpoint."""

    __slots__ = ("bits", "complete", "count")

    def __init__(self) -> None:
        self.complete = False
        self.bits = 0
        """Bit i is piece i; 0 once it is complete. Pieces that are here too may be left out."""
        self.count = 0
        """How many it says to hold, unless it is complete."""

    def has(self, index: int) -> bool:
        """Whether it claims this piece; -1, the manifest, only with the whole checkpoint."""
        return self.complete or (index >= 0 and bool(self.bits >> index & 1))

    def of(self, pieces: int) -> int:
        """Those of some pieces that it claims."""
        return pieces if self.complete else pieces & self.bits

    def lacks(self, pieces: int) -> int:
        """How many of so many pieces it does not hold."""
        return 0 if self.complete else max(0, pieces - self.count)


class _Mine:
    """What is here of one checkpoint."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.bits = 0
        self.shown = 0
        """Pieces not sent yet that some neighbour was told of, while it is being seeded."""


class _Told:
    """What one neighbour was told of one checkpoint."""

    def __init__(self) -> None:
        self.at = -inf
        self.bits = 0
        self.complete = False
        self.gone = False
        self.ending = False
        """It lacks only few pieces."""


class _Neighbour:
    """A peer that this one announces to."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.timer = trio.CancelScope()
        """Its deadline is when to speak next."""
        self.due = inf
        self.news: dict[bytes, None] = {}
        """Checkpoints of which there may be news, in order."""
        self.told: dict[bytes, _Told] = {}

    def speak_at(self, time: float) -> None:
        if time < self.due:
            self.due = self.timer.deadline = time


def _bitmap(manifest: bytes, bits: int) -> _Bitmap:
    return _Bitmap(manifest, bits.to_bytes((bits.bit_length() + 7) // 8, "little"))


def _indices(bits: int) -> list[int]:
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


class HaveExchange:
    """Announces what this peer's store holds and remembers what its neighbours claim."""

    def __init__(
        self,
        world: World,
        transport: Transport,
        store: CheckpointStore,
        events: Events,
        *,
        uploads: Uploads | None = None,
        meet: Meet | None = None,
        tells: Callable[[], bool] = lambda: True,
    ) -> None:
        """With `uploads`, a peer looks for as many neighbours as its uplink can feed: among those
        connected, and through `meet`. While `tells()` is false it opens its streams, so that
        neighbours announce to it, and says nothing on them."""
        self._world = world
        self._transport = transport
        self._store = store
        self._events = events
        self._neighbours: dict[PeerId, _Neighbour] = {}
        # Peers that broke the stream or do not speak the protocol: tried again on reconnecting.
        self._unwilling: set[PeerId] = set()
        self._claims: dict[PeerId, OrderedDict[bytes, Claim]] = {}
        self._listening: dict[PeerId, trio.CancelScope] = {}
        """What ends the listener whose claims these are."""
        self._rarity: dict[bytes, Rarity] = {}
        self._mine: dict[bytes, _Mine] = {}
        self._on_change: list[Callable[[PeerId], None]] = []
        self._nursery: trio.Nursery | None = None
        self._uploads = uploads
        self._meet = meet
        self._tells = tells
        self.late = False
        """Whether any running fetch is behind those of the neighbours: set by the fetcher."""
        self._stirred = trio.Event()
        """A checkpoint has changed since growing was given up."""
        self._heard = trio.Event()
        """Some neighbour has said something since."""
        store.watch(self._changed)

    # --- what others have --------------------------------------------------------------------

    def claim(self, peer: PeerId, manifest: bytes) -> Claim | None:
        """What a neighbour claims of a checkpoint; None when it never spoke of it."""
        claims = self._claims.get(peer)
        return claims.get(manifest) if claims is not None else None

    def speaks(self, peer: PeerId) -> bool:
        """Whether this peer announces to us, so that its silence on a checkpoint has a meaning."""
        return peer in self._claims

    async def wait_claimed(self, manifest: bytes, seconds: float) -> bool:
        """Whether any neighbour claims anything of a checkpoint, by now or within so long."""
        with trio.move_on_after(seconds):
            while not self._is_claimed(manifest):
                await self._heard.wait()
        return self._is_claimed(manifest)

    def _is_claimed(self, manifest: bytes) -> bool:
        return any(manifest in claims for claims in self._claims.values())

    def rarest(self, manifest: bytes, pieces: int) -> int:
        """Those of some pieces that fewest neighbours have. Whoever has everything does not
        count: he makes no piece rarer than another."""
        rarity = self._rarity.get(manifest)
        return rarity.rarest(pieces) if rarity is not None else pieces

    def on_change(self, callback: Callable[[PeerId], None]) -> None:
        """Call `callback(peer)` whenever a neighbour claims something new, or no longer."""
        self._on_change.append(callback)

    # --- announcing --------------------------------------------------------------------------

    def tells_changed(self) -> None:
        """`tells()` says something else now: all neighbours hear what is here, or that it is
        gone."""
        self._stirred.set()
        for neighbour in self._neighbours.values():
            self._tell_all(neighbour)

    def _tell_all(self, neighbour: _Neighbour) -> None:
        for held in self._store.all()[-defaults.HAVE_CHECKPOINTS_MAX :]:
            neighbour.news[held.digest] = None
        if neighbour.news or neighbour.told:
            neighbour.speak_at(-inf)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Announce and listen until cancelled."""
        self._transport.serve(PROTOCOL, self._listen, frame_bytes_max=_FRAME_BYTES_MAX)
        events = self._transport.connection_events()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._fill()
            if self._uploads is not None:
                nursery.start_soon(self._grow, self._uploads)
            task_status.started()
            async for event in events:
                self._unwilling.discard(event.peer)
                if not event.connected and event.peer in self._neighbours:
                    self._neighbours[event.peer].scope.cancel()
                self._fill()

    def _fill(self) -> None:
        """Announce to more of the connected peers, picked at random, while there are too few."""
        if self._nursery is None or self._nursery.cancel_scope.cancel_called:
            return
        room = defaults.HAVE_NEIGHBOURS - len(self._neighbours)
        if room <= 0:
            return
        others = [
            peer
            for peer in self._transport.connected()
            if peer not in self._neighbours and peer not in self._unwilling
        ]
        for peer in self._world.random.sample(others, min(room, len(others))):
            self._begin(peer)

    def _begin(self, peer: PeerId) -> None:
        if self._nursery is None or self._nursery.cancel_scope.cancel_called:
            return
        self._neighbours[peer] = _Neighbour()
        self._nursery.start_soon(self._announce, peer, self._neighbours[peer])

    async def _grow(self, uploads: Uploads) -> None:
        """Announce to more peers while fewer than the uplink can feed want something, or while
        this peer is late: they will announce to it too. Whoever tells nothing has neighbours as
        sources only."""
        while True:
            self._stirred = trio.Event()
            await self._stirred.wait()
            last: PeerId | None = None
            fruitless = 0
            seconds = defaults.HAVE_GROW_SECONDS
            while fruitless < defaults.HAVE_FRUITLESS_MAX:
                await trio.sleep(seconds)
                held = self._newest()
                if held is None or len(self._neighbours) >= defaults.HAVE_NEIGHBOURS_MAX:
                    break
                if last is not None:
                    fruitless = 0 if self._wants(last, held) else fruitless + 1
                    last = None
                enough: float
                enough = defaults.HAVE_NEIGHBOURS_LATE if self.late else defaults.HAVE_NEIGHBOURS
                count = len(self._neighbours)
                if self._tells():
                    fed = uploads.bytes_per_second / defaults.HAVE_NEIGHBOUR_BYTES_PER_SECOND
                    enough = max(fed, enough)
                    count = sum(self._wants(peer, held) for peer in self._neighbours)
                if count >= enough:
                    seconds = defaults.HAVE_SATED_SECONDS
                    continue
                seconds = defaults.HAVE_GROW_SECONDS
                last = await self._another()
                if last is None:
                    break
                self._begin(last)

    def _wants(self, peer: PeerId, held: Held) -> bool:
        """Whether a neighbour has not all of a checkpoint, as far as is known."""
        claim = self.claim(peer, held.digest)
        return claim is None or not claim.complete

    def _newest(self) -> Held | None:
        """The newest checkpoint, if enough of it is here to be of use to others. One of few pieces
        is everywhere before more neighbours could help."""
        held = next((one for one in reversed(self._store.all()) if not one.is_delta), None)
        if held is None:
            return None
        there = self._mine_of(held).bits.bit_count()
        return held if there >= defaults.HAVE_GROW_PIECES else None

    async def _another(self) -> PeerId | None:
        """Somebody connected who is no neighbour yet."""
        others = [
            peer
            for peer in self._transport.connected()
            if peer not in self._neighbours and peer not in self._unwilling
        ]
        if others:
            return self._world.random.choice(others)
        if self._meet is None:
            return None
        peer = await self._meet()
        return peer if peer not in self._neighbours else None

    async def _announce(self, peer: PeerId, neighbour: _Neighbour) -> None:
        self._tell_all(neighbour)
        try:
            with neighbour.scope:
                with trio.fail_after(defaults.HAVE_DEADLINE_SECONDS):
                    stream = await self._transport.open_stream(peer, PROTOCOL)
                await self._tell(stream, peer, neighbour)
        except (StreamError, trio.TooSlowError) as error:
            # Most often a peer without this protocol: a bootstrap peer, say.
            self._unwilling.add(peer)
            self._events.emit("shardcast.neighbour_lost", remote=peer, reason=str(error))
        finally:
            del self._neighbours[peer]
            self._untell(neighbour)
            self._fill()

    def _untell(self, neighbour: _Neighbour) -> None:
        """A neighbour knows nothing any more: others are shown what it did not fetch."""
        for digest, told in neighbour.told.items():
            if digest in self._mine:
                self._mine[digest].shown &= ~told.bits
        neighbour.told.clear()

    async def _tell(self, stream: Stream, peer: PeerId, neighbour: _Neighbour) -> None:
        try:
            while True:
                with trio.CancelScope(deadline=neighbour.due) as neighbour.timer:
                    await trio.sleep_forever()
                entries = self._take(peer, neighbour)
                for start in range(0, len(entries), defaults.HAVE_CHECKPOINTS_MAX):
                    some = entries[start : start + defaults.HAVE_CHECKPOINTS_MAX]
                    with trio.fail_after(defaults.HAVE_DEADLINE_SECONDS):
                        await stream.send(_encoder.encode(some))
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await stream.reset()

    def _take(self, peer: PeerId, neighbour: _Neighbour) -> list[_Entry]:
        """Entries that bring this neighbour up to date."""
        now = self._world.now()
        entries: list[_Entry] = []
        if not self._tells():
            entries += [_Gone(digest) for digest in neighbour.told]
            self._untell(neighbour)
            neighbour.news.clear()
        for digest in neighbour.news:
            told = neighbour.told.setdefault(digest, _Told())
            entry = self._entry(peer, digest, told)
            if entry is not None:
                entries.append(entry)
                told.at = now
            if told.gone:
                del neighbour.told[digest]
        neighbour.news.clear()
        neighbour.due = inf
        return entries

    def _entry(self, peer: PeerId, digest: bytes, told: _Told) -> _Entry | None:
        """What is to be said about one checkpoint, if anything."""
        held = self._store.named(digest)
        if held is None:
            told.gone = True
            return _Gone(digest) if told.at > -inf else None
        if held.complete and not held.unsent:
            if told.complete:
                return None
            told.complete = True
            return _Complete(digest)
        mine = self._mine_of(held)
        here = self._show(held, mine, told) if held.unsent else mine.bits
        claim = self.claim(peer, digest)
        known = told.bits | claim.bits if claim is not None else told.bits
        news = here & ~known
        if not news and told.at > -inf:
            return None
        told.bits |= here
        if told.at > -inf and news.bit_count() * 24 < news.bit_length():
            return _Pieces(digest, _indices(news), here.bit_count())
        return _bitmap(digest, told.bits)

    def _show(self, held: Held, mine: _Mine, told: _Told) -> int:
        """Pieces of a checkpoint published here for this neighbour to fetch: not the same as for
        others, while there are some that nobody was told of."""
        shown = told.bits
        room = defaults.SEEDING_SHOWN - (shown & held.unsent).bit_count()
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
        self._stirred.set()
        if change is Change.REMOVED:
            self._mine.pop(digest, None)
        else:
            mine = self._mine_of(held)
            if change is Change.PIECE:
                mine.bits |= 1 << index
        if change is Change.LEFT:
            self._piece_left(held, index, now)
            return
        for peer, neighbour in self._neighbours.items():
            if change is Change.PIECE:
                if digest in neighbour.news:
                    continue
                claim = self.claim(peer, digest)
                if claim is not None and claim.has(index) and digest in neighbour.told:
                    continue
                due = self._due(neighbour, digest, now)
            else:
                due = now if change is Change.COMPLETE else now + defaults.HAVE_BATCH_SECONDS
            neighbour.news[digest] = None
            neighbour.speak_at(due)

    def _due(self, neighbour: _Neighbour, digest: bytes, now: float) -> float:
        """When a neighbour is told of a new piece."""
        told = neighbour.told.get(digest)
        soonest = now + defaults.HAVE_BATCH_SECONDS
        if told is None or told.ending:
            return soonest
        wait = defaults.HAVE_PATIENCE * (now - self._mine[digest].began)
        return max(soonest, told.at + min(wait, defaults.HAVE_BATCH_SECONDS_MAX))

    def _mine_of(self, held: Held) -> _Mine:
        mine = self._mine.get(held.digest)
        if mine is None:
            mine = self._mine[held.digest] = _Mine(self._world.now())
            mine.bits = bits_of(held.pieces)
        return mine

    def _piece_left(self, held: Held, index: int, now: float) -> None:
        """A piece of what was published here is on its way for the first time: whoever was shown
        it is shown more, and when all have left, everybody everything."""
        unsent = held.unsent
        if unsent and unsent.bit_count() <= len(held.pieces) * defaults.SEEDING_END_SHARE:
            # Better to send a few of the last ones twice than to wait for who has them on his list.
            self._store.seeding.end(held.digest)
            return
        bit = 1 << index if index >= 0 else 0
        all_shown = not unsent & ~self._mine_of(held).shown
        for neighbour in self._neighbours.values():
            told = neighbour.told.get(held.digest)
            if all_shown or (told is not None and told.bits & bit):
                neighbour.news[held.digest] = None
                neighbour.speak_at(now)

    # --- listening ---------------------------------------------------------------------------

    async def _listen(self, stream: Stream) -> None:
        peer = stream.peer
        if peer not in self._claims and len(self._claims) >= defaults.HAVE_INBOUND_MAX:
            await stream.reset()
            return
        older = self._listening.get(peer)
        if older is not None:
            older.cancel()
        self._forget(peer)
        claims: OrderedDict[bytes, Claim] = OrderedDict()
        self._claims[peer] = claims
        self._listening[peer] = scope = trio.CancelScope()
        if (
            peer not in self._neighbours
            and peer not in self._unwilling
            and len(self._neighbours) < defaults.HAVE_NEIGHBOURS_MAX
        ):
            self._begin(peer)
        rate = 1 / defaults.HAVE_FRAME_SECONDS_MIN
        frames = TokenBucket(rate, burst=rate)
        try:
            with scope:
                # What an older stream still brings would be counted and never taken back.
                while (raw := await stream.receive()) is not None and not scope.cancel_called:
                    for entry in _decoder.decode(raw):
                        self._apply(peer, claims, entry)
                    self._tell_changed(peer)
                    # A burst of a second passes; a faster neighbour waits for its stream's credit.
                    now = self._world.now()
                    frames.borrow(1, now)
                    seconds = frames.debt_seconds(now)
                    if seconds:
                        await trio.sleep(seconds)
        except (StreamError, *DECODE_ERRORS) as error:
            self._events.emit("shardcast.neighbour_silent", remote=peer, reason=str(error))
            await stream.reset()
        finally:
            if self._listening.get(peer) is scope:
                del self._listening[peer]
                self._forget(peer)
                self._tell_changed(peer)

    def _tell_changed(self, peer: PeerId) -> None:
        self._heard.set()
        self._heard = trio.Event()
        for callback in self._on_change:
            callback(peer)

    def _forget(self, peer: PeerId) -> None:
        """All that a neighbour claimed."""
        for digest, claim in self._claims.pop(peer, {}).items():
            self._count(digest, claim.bits, 0)

    def _count(self, digest: bytes, old: int, new: int) -> None:
        """One neighbour claims other pieces now."""
        rarity = self._rarity.get(digest)
        if rarity is None:
            if not new:
                return
            rarity = self._rarity[digest] = Rarity()
        rarity.remove(old & ~new)
        rarity.add(new & ~old)
        if rarity.empty():
            del self._rarity[digest]

    def _apply(self, peer: PeerId, claims: OrderedDict[bytes, Claim], entry: _Entry) -> None:
        digest = entry.manifest
        claim = claims.pop(digest, None) if isinstance(entry, _Gone) else claims.get(digest)
        if isinstance(entry, _Gone):
            if claim is not None:
                self._count(digest, claim.bits, 0)
            return
        if claim is None:
            claim = claims[digest] = Claim()
            while len(claims) > defaults.HAVE_CHECKPOINTS_MAX:
                oldest, dropped = claims.popitem(last=False)
                self._count(oldest, dropped.bits, 0)
        old = claim.bits
        if isinstance(entry, _Complete):
            claim.complete = True
            claim.bits = 0
        elif isinstance(entry, _Bitmap):
            claim.complete = False
            claim.bits = int.from_bytes(entry.pieces, "little")
            claim.count = claim.bits.bit_count()
        elif not claim.complete:
            there = bytearray(max(entry.indices, default=-1) + 1)
            for index in entry.indices:
                there[index] = 1
            claim.bits |= bits_of(there)
            claim.count = entry.count
        self._count(digest, old, claim.bits)
        self._note_progress(peer, digest, claim)

    def _note_progress(self, peer: PeerId, digest: bytes, claim: Claim) -> None:
        """A neighbour that lacks only few pieces hears at once of new ones."""
        neighbour, held = self._neighbours.get(peer), self._store.named(digest)
        if neighbour is None or held is None or held.complete:
            return
        told = neighbour.told.get(digest)
        lacks = claim.lacks(len(held.pieces))
        if told is None or lacks > len(held.pieces) * defaults.HAVE_ENDING_SHARE:
            return
        told.ending = True
        if digest in neighbour.news:
            neighbour.speak_at(self._world.now() + defaults.HAVE_BATCH_SECONDS)
