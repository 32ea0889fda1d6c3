"""Who has what: neighbours tell each other which pieces they hold.

Protocol `/swarm/have/1.0.0`, framing SWARM, one stream each way; its receiver only listens. A
frame is a msgpack array of tagged entries, each about one checkpoint, named by its manifest's
digest:

    ["bitmap", manifest, bytes]    first word on a checkpoint: bit i % 8 of byte i / 8 is piece i
    ["pieces", manifest, indices]  more pieces, at most every 250 ms
    ["complete", manifest]         all of it; sent at once
    ["gone", manifest]             no longer

What a peer claims only decides whom to ask for what, so a lie costs one refused request, and the
liar its standing as a source.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, TypeAlias

import msgspec
import trio
from msgspec import Meta

from swarm import defaults
from swarm.errors import DECODE_ERRORS
from swarm.events import Events
from swarm.identity import PeerId
from swarm.messages import Digest
from swarm.shardcast.store import Change, CheckpointStore, Held
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


class _Complete(msgspec.Struct, array_like=True, frozen=True, tag="complete"):
    manifest: Digest


class _Gone(msgspec.Struct, array_like=True, frozen=True, tag="gone"):
    manifest: Digest


_Entry: TypeAlias = _Bitmap | _Pieces | _Complete | _Gone
_Frame: TypeAlias = Annotated[list[_Entry], Meta(max_length=defaults.HAVE_CHECKPOINTS_MAX)]

_decoder: msgspec.msgpack.Decoder[list[_Entry]] = msgspec.msgpack.Decoder(_Frame)
_encoder = msgspec.msgpack.Encoder()


class Claim:
    """What one peer says it holds of one checkpoint."""

    __slots__ = ("_bits", "complete")

    def __init__(self) -> None:
        self.complete = False
        self._bits = bytearray()

    def has(self, index: int) -> bool:
        """Whether it claims this piece; -1, the manifest, only with the whole checkpoint."""
        if self.complete:
            return True
        byte = index >> 3
        return 0 <= byte < len(self._bits) and bool(self._bits[byte] >> (index & 7) & 1)

    def add(self, index: int) -> None:
        byte = index >> 3
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        self._bits[byte] |= 1 << (index & 7)

    def replace(self, bits: bytes) -> None:
        self.complete = False
        self._bits = bytearray(bits)


class _Neighbour:
    """A peer that this one announces to, and what it was not told yet."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.wake = trio.Event()
        self.urgent = False
        """Something is new that must not wait for the next batch."""
        self.news: dict[bytes, None] = {}
        """Manifests about which everything is to be said again, in order."""
        self.pieces: dict[bytes, list[int]] = {}
        """New pieces of manifests it knows of."""

    def changed(self, change: Change, held: Held, index: int) -> None:
        if change is Change.PIECE:
            if held.digest not in self.news:
                self.pieces.setdefault(held.digest, []).append(index)
        else:
            self.pieces.pop(held.digest, None)
            self.news[held.digest] = None
            self.urgent |= change is Change.COMPLETE
        self.wake.set()

    def take(self, store: CheckpointStore) -> list[_Entry]:
        """Entries that bring this neighbour up to date, and nothing left to say."""
        entries = [_entry(store, digest) for digest in self.news]
        for digest, indices in self.pieces.items():
            few = len(indices) <= _INDICES_MAX
            entries.append(_Pieces(digest, indices) if few else _entry(store, digest))
        self.news = {}
        self.pieces = {}
        self.urgent = False
        self.wake = trio.Event()
        return entries


def _entry(store: CheckpointStore, digest: bytes) -> _Entry:
    """All there is to say about one checkpoint."""
    held = store.named(digest)
    if held is None:
        return _Gone(digest)
    if held.complete:
        return _Complete(digest)
    bits = bytearray((len(held.pieces) + 7) // 8)
    for index, there in enumerate(held.pieces):
        if there:
            bits[index >> 3] |= 1 << (index & 7)
    return _Bitmap(digest, bytes(bits))


class HaveExchange:
    """Announces what this peer's store holds and remembers what its neighbours claim."""

    def __init__(
        self, world: World, transport: Transport, store: CheckpointStore, events: Events
    ) -> None:
        self._world = world
        self._transport = transport
        self._store = store
        self._events = events
        self._neighbours: dict[PeerId, _Neighbour] = {}
        # Peers that broke the stream or do not speak the protocol: tried again on reconnecting.
        self._unwilling: set[PeerId] = set()
        self._claims: dict[PeerId, OrderedDict[bytes, Claim]] = {}
        self._on_change: list[Callable[[PeerId], None]] = []
        self._nursery: trio.Nursery | None = None
        store.watch(self._changed)

    # --- what others have --------------------------------------------------------------------

    def claim(self, peer: PeerId, manifest: bytes) -> Claim | None:
        """What a neighbour claims of a checkpoint; None when it never spoke of it."""
        claims = self._claims.get(peer)
        return claims.get(manifest) if claims is not None else None

    def speaks(self, peer: PeerId) -> bool:
        """Whether this peer announces to us, so that its silence on a checkpoint has a meaning."""
        return peer in self._claims

    def claims_on(self, manifest: bytes) -> list[Claim]:
        """Every neighbour's claim on one checkpoint: counted to find the rarest piece."""
        return [claims[manifest] for claims in self._claims.values() if manifest in claims]

    def on_change(self, callback: Callable[[PeerId], None]) -> None:
        """Call `callback(peer)` whenever a neighbour claims something new."""
        self._on_change.append(callback)

    # --- announcing --------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Announce and listen until cancelled."""
        self._transport.serve(PROTOCOL, self._listen, frame_bytes_max=_FRAME_BYTES_MAX)
        events = self._transport.connection_events()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._fill()
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
            self._neighbours[peer] = _Neighbour()
            self._nursery.start_soon(self._announce, peer, self._neighbours[peer])

    async def _announce(self, peer: PeerId, neighbour: _Neighbour) -> None:
        for held in self._store.all()[-defaults.HAVE_CHECKPOINTS_MAX :]:
            neighbour.changed(Change.BEGUN, held, -1)
            neighbour.urgent = True
        try:
            with neighbour.scope:
                with trio.fail_after(defaults.HAVE_DEADLINE_SECONDS):
                    stream = await self._transport.open_stream(peer, PROTOCOL)
                await self._tell(stream, neighbour)
        except (StreamError, trio.TooSlowError) as error:
            # Most often a peer without this protocol: a bootstrap peer, say.
            self._unwilling.add(peer)
            self._events.emit("shardcast.neighbour_lost", remote=peer, reason=str(error))
        finally:
            del self._neighbours[peer]
            self._fill()

    async def _tell(self, stream: Stream, neighbour: _Neighbour) -> None:
        try:
            while True:
                await neighbour.wake.wait()
                # A small checkpoint is complete before the batch is due: one frame says it all.
                with trio.move_on_after(defaults.HAVE_BATCH_SECONDS):
                    while not neighbour.urgent:
                        neighbour.wake = trio.Event()
                        await neighbour.wake.wait()
                entries = neighbour.take(self._store)
                for start in range(0, len(entries), defaults.HAVE_CHECKPOINTS_MAX):
                    some = entries[start : start + defaults.HAVE_CHECKPOINTS_MAX]
                    with trio.fail_after(defaults.HAVE_DEADLINE_SECONDS):
                        await stream.send(_encoder.encode(some))
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await stream.reset()

    def _changed(self, change: Change, held: Held, index: int) -> None:
        for neighbour in self._neighbours.values():
            neighbour.changed(change, held, index)

    # --- listening ---------------------------------------------------------------------------

    async def _listen(self, stream: Stream) -> None:
        peer = stream.peer
        if peer not in self._claims and len(self._claims) >= defaults.HAVE_INBOUND_MAX:
            await stream.reset()
            return
        claims: OrderedDict[bytes, Claim] = OrderedDict()
        self._claims[peer] = claims
        due = 0.0
        try:
            while (raw := await stream.receive()) is not None:
                for entry in _decoder.decode(raw):
                    _apply(claims, entry)
                for callback in self._on_change:
                    callback(peer)
                # Bursts pass; whoever talks faster for longer waits for the stream's credit.
                now = self._world.now()
                due = max(due + defaults.HAVE_FRAME_SECONDS_MIN, now - 1.0)
                if due > now:
                    await trio.sleep_until(due)
        except (StreamError, *DECODE_ERRORS) as error:
            self._events.emit("shardcast.neighbour_silent", remote=peer, reason=str(error))
            await stream.reset()
        finally:
            if self._claims.get(peer) is claims:
                del self._claims[peer]


def _apply(claims: OrderedDict[bytes, Claim], entry: _Entry) -> None:
    if isinstance(entry, _Gone):
        claims.pop(entry.manifest, None)
        return
    claim = claims.setdefault(entry.manifest, Claim())
    if isinstance(entry, _Complete):
        claim.complete = True
    elif isinstance(entry, _Bitmap):
        claim.replace(entry.pieces)
    else:
        for index in entry.indices:
            claim.add(index)
    while len(claims) > defaults.HAVE_CHECKPOINTS_MAX:
        claims.popitem(last=False)
