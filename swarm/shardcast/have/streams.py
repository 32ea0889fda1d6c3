"""The streams on which neighbours announce their pieces, and the choice of neighbours."""

from collections.abc import Awaitable, Callable

import trio

from swarm.errors import DECODE_ERRORS
from swarm.events import Events
from swarm.shardcast.have import claims
from swarm.shardcast.have.announcing import Announcer, Neighbour
from swarm.shardcast.held import Held
from swarm.shardcast.store import CheckpointStore
from swarm.shardcast.uploads import Uploads
from swarm.transport import Stream, StreamError, Transport
from swarm.transport.rates import TokenBucket
from swarm.wire.identity import PeerId
from swarm.world import World

NEIGHBOURS = 8
"""Neighbours that a peer looks for."""

NEIGHBOURS_LATE = 16
"""Neighbours that a late peer looks for: most of its neighbours may be on slow lines."""

NEIGHBOURS_MAX = 64
"""Neighbours that a peer announces to, including those that chose it."""

NEIGHBOUR_BYTES_PER_SECOND = 4e6
"""What a neighbour takes on average: it receives 25 MB/s in a swarm with the average uplink of 200
Mb/s, and takes only what it lacks. So 31 neighbours for 1 Gb/s."""

GROW_PIECES = 64
"""A checkpoint of fewer pieces reaches every peer before more neighbours could help."""

GROW_SECONDS = 1.0
"""Between two new neighbours of a peer whose uplink can feed more."""

SATED_SECONDS = 12.0
"""Pause before a peer with enough neighbours checks whether they still want something."""

FRUITLESS_MAX = 12
"""After this many new neighbours in a row want nothing, look again when the store changes."""

INBOUND_MAX = 256
"""Peers whose announcements are received at once."""

DEADLINE_SECONDS = 10.0
"""Sending an announcement; a neighbour that does not accept it in time is dropped."""

FRAMES_PER_SECOND = 50.0
"""Frames of one neighbour read on average; honest ones come every 250 ms."""

FRAMES_BURST = 51.0
"""Frames of one neighbour read at once: the first, and those of one second."""

Meet = Callable[[], Awaitable[PeerId | None]]
"""Connects to one more peer that may want checkpoints; None when none is known."""


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
        """With `uploads`, the peer looks for as many neighbours as its uplink can feed: among the
        connected peers, and through `meet`. While `tells()` is false it announces nothing, but it
        opens its streams, so that neighbours announce to it."""
        self._world = world
        self._transport = transport
        self._store = store
        self._events = events
        self.claims = claims.Claims()
        idle = uploads.is_idle if uploads is not None else lambda: False
        self._announcer = Announcer(world, store, self.claims, tells, idle)
        self._neighbours = self._announcer.neighbours
        self._unwilling: set[PeerId] = set()
        """Peers that broke the stream or lack the protocol: tried again after reconnecting."""
        self._listening: dict[PeerId, trio.CancelScope] = {}
        """Per peer, cancels the task that receives its announcements."""
        self._nursery: trio.Nursery | None = None
        self._uploads = uploads
        self._meet = meet
        self.late = False
        """Whether any running fetch is behind the neighbours' fetches; the fetcher sets it."""
        self._stirred = trio.Event()
        """Set when a checkpoint has changed since the peer stopped looking for neighbours."""
        store.watch(lambda *change: self._stirred.set())

    def tells_changed(self) -> None:
        """Announce all checkpoints to all neighbours, or withdraw them, since `tells()` changed."""
        self._stirred.set()
        for neighbour in self._neighbours.values():
            self._announcer.tell_all(neighbour)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Announce and listen until cancelled."""
        self._transport.serve(claims.PROTOCOL, self._listen, frame_bytes_max=claims.FRAME_BYTES_MAX)
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
        """Announce to more of the connected peers, drawn at random, while there are too few."""
        if self._nursery is None or self._nursery.cancel_scope.cancel_called:
            return
        room = NEIGHBOURS - len(self._neighbours)
        if room <= 0:
            return
        others = self._others()
        for peer in self._world.random.sample(others, min(room, len(others))):
            self._begin(peer)

    def _others(self) -> list[PeerId]:
        return [
            peer
            for peer in self._transport.connected()
            if peer not in self._neighbours and peer not in self._unwilling
        ]

    def _begin(self, peer: PeerId) -> None:
        if self._nursery is None or self._nursery.cancel_scope.cancel_called:
            return
        self._neighbours[peer] = Neighbour()
        self._nursery.start_soon(self._announce, peer, self._neighbours[peer])

    async def _grow(self, uploads: Uploads) -> None:
        """Find more neighbours while fewer want pieces than the uplink can feed, or while this peer
        is late: new neighbours announce to it too.

        A peer that announces nothing has neighbours only as sources."""
        while True:
            self._stirred = trio.Event()
            await self._stirred.wait()
            last: PeerId | None = None
            fruitless = 0
            seconds = GROW_SECONDS
            while fruitless < FRUITLESS_MAX:
                await trio.sleep(seconds)
                held = self._newest()
                if held is None or len(self._neighbours) >= NEIGHBOURS_MAX:
                    break
                if last is not None:
                    fruitless = 0 if self._wants(last, held) else fruitless + 1
                    last = None
                enough: float = NEIGHBOURS_LATE if self.late else NEIGHBOURS
                count = len(self._neighbours)
                if self._announcer.tells():
                    enough = max(uploads.bytes_per_second / NEIGHBOUR_BYTES_PER_SECOND, enough)
                    count = sum(self._wants(peer, held) for peer in self._neighbours)
                if count >= enough:
                    seconds = SATED_SECONDS
                    continue
                seconds = GROW_SECONDS
                last = await self._another()
                if last is None:
                    break
                self._begin(last)

    def _wants(self, peer: PeerId, held: Held) -> bool:
        claim = self.claims.of(peer, held.digest)
        return claim is None or not claim.complete

    def _newest(self) -> Held | None:
        """The newest checkpoint, if it is large and this peer has any of its pieces to offer."""
        held = next((one for one in reversed(self._store.all()) if not one.is_delta), None)
        if held is None:
            return None
        large = len(held.pieces) >= GROW_PIECES
        return held if large and self._announcer.mine_of(held).bits else None

    async def _another(self) -> PeerId | None:
        """A connected peer that is not yet a neighbour; else a new connection through `meet`."""
        if others := self._others():
            return self._world.random.choice(others)
        if self._meet is None:
            return None
        peer = await self._meet()
        return peer if peer not in self._neighbours else None

    async def _announce(self, peer: PeerId, neighbour: Neighbour) -> None:
        self._announcer.tell_all(neighbour)
        try:
            with neighbour.scope:
                with trio.fail_after(DEADLINE_SECONDS):
                    stream = await self._transport.open_stream(peer, claims.PROTOCOL)
                await self._tell(stream, peer, neighbour)
        except (StreamError, trio.TooSlowError) as error:
            # Usually a peer without this protocol: a bootstrap peer, for instance.
            self._unwilling.add(peer)
            self._events.emit("shardcast.neighbour_lost", remote=peer, reason=str(error))
        finally:
            del self._neighbours[peer]
            self._announcer.forget(neighbour)
            self._fill()

    async def _tell(self, stream: Stream, peer: PeerId, neighbour: Neighbour) -> None:
        try:
            while True:
                with trio.CancelScope(deadline=neighbour.due) as neighbour.timer:
                    await trio.sleep_forever()
                entries = self._announcer.take(peer, neighbour)
                for start in range(0, len(entries), claims.ENTRIES_MAX):
                    some = entries[start : start + claims.ENTRIES_MAX]
                    with trio.fail_after(DEADLINE_SECONDS):
                        await stream.send(claims.encode(some))
        finally:
            await stream.reset()

    async def _listen(self, stream: Stream) -> None:
        peer = stream.peer
        # A peer that announces already only replaces its stream, so it needs no further room.
        if not self.claims.announces(peer) and len(self.claims) >= INBOUND_MAX:
            await stream.reset()
            return
        older = self._listening.get(peer)
        if older is not None:
            older.cancel()
        # The newer stream counts: the older one may be half of a connection that is gone. Its
        # claims end with it, since a stream begins with everything its sender holds.
        self.claims.begin(peer)
        self._listening[peer] = scope = trio.CancelScope()
        if (
            peer not in self._neighbours
            and peer not in self._unwilling
            and len(self._neighbours) < NEIGHBOURS_MAX
        ):
            self._begin(peer)
        frames = TokenBucket(FRAMES_PER_SECOND, FRAMES_BURST)
        try:
            with scope:
                # Entries of a replaced stream would be counted and never withdrawn.
                while (raw := await stream.receive()) is not None and not scope.cancel_called:
                    entries = claims.decode(raw)
                    for entry in entries:
                        self.claims.apply(peer, entry)
                    self.claims.changed(peer, {entry.manifest for entry in entries})
                    # A burst is read at once; a neighbour that goes on so fast has to wait.
                    await frames.spend(1)
        except (StreamError, *DECODE_ERRORS) as error:
            self._events.emit("shardcast.neighbour_silent", remote=peer, reason=str(error))
            await stream.reset()
        finally:
            # A replaced task must not take the claims of its successor along.
            if self._listening.get(peer) is scope:
                del self._listening[peer]
                self.claims.forget(peer)
                self.claims.changed(peer)
