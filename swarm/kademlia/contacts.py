"""Requests to DHT peers, checks of them, and lookups through them; one deadline for each request.
Streams are kept, since opening one costs a round trip; some generic nodes close theirs."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from swarm.errors import DeadlineError, PeerError
from swarm.kademlia import wire
from swarm.kademlia.lookup import Lookup, LookupResult
from swarm.kademlia.routing_table import BUCKET_SIZE, CONTACT_FRESH_SECONDS, RoutingTable, key_id
from swarm.kademlia.wire import Message, MessageType, Neighbour
from swarm.transport import Stream, StreamError, Transport
from swarm.wire.identity import PeerId, peer_id_bytes
from swarm.world import World
from swarm.world.recent import Recent

REQUEST_SECONDS_MAX = 10.0
"""Deadline of one request, its connection included."""

OUTBOUND_IDLE_SECONDS = 30.0
"""A stream idle for this long is not reused: well before the other side resets it."""

OUTBOUND_STREAMS_MAX = 64
"""Idle streams kept for reuse: one per peer, the most recently used ones."""


@dataclass
class _Idle:
    stream: Stream
    until: float


class Requests:
    """Outgoing requests of one peer."""

    def __init__(self, transport: Transport, world: World) -> None:
        self._transport = transport
        self._world = world
        self._idle: OrderedDict[PeerId, _Idle] = OrderedDict()

    async def ask(self, to: Neighbour, message: Message) -> Message:
        """Raises `ConnectError`, `StreamError`, `WireError`, or `DeadlineError` after
        `REQUEST_SECONDS_MAX`: all of them `PeerError`."""
        with trio.move_on_after(REQUEST_SECONDS_MAX):
            return await self._ask(to, message)
        raise self._late(to, message)

    async def tell(self, to: Neighbour, message: Message) -> None:
        """Send ADD_PROVIDER, until the peer has closed or reset the stream. Raises as `ask`."""
        with trio.move_on_after(REQUEST_SECONDS_MAX):
            stream = await self._open(to)
            try:
                await stream.send(wire.encode(message))
                await stream.end()
                with contextlib.suppress(StreamError):  # js-libp2p resets a stream ended by us
                    while await stream.receive() is not None:
                        pass  # some implementations echo the message
            except BaseException:
                await stream.reset()
                raise
            return
        raise self._late(to, message)

    async def close(self) -> None:
        """Reset the streams kept for reuse."""
        while self._idle:
            _, idle = self._idle.popitem()
            await idle.stream.reset()

    async def _ask(self, to: Neighbour, message: Message) -> Message:
        data = wire.encode(message)
        idle = self._idle.pop(to.peer, None)
        if idle is not None and idle.until > self._world.now():
            try:
                return await self._exchange(idle.stream, data, message)
            except StreamError:
                idle = None  # closed since the last request: try a new stream
        if idle is not None:
            await idle.stream.reset()
        return await self._exchange(await self._open(to), data, message)

    async def _open(self, to: Neighbour) -> Stream:
        await self._transport.connect(to.peer, to.addresses)
        return await self._transport.open_stream(to.peer, wire.PROTOCOL)

    async def _exchange(self, stream: Stream, data: bytes, message: Message) -> Message:
        try:
            await stream.send(data)
            frame = await stream.receive()
            if frame is None:
                raise StreamError(f"{stream.peer} closed the stream without an answer")
            answer = wire.decode(frame)
            if answer.type != message.type:
                raise wire.WireError(
                    f"{stream.peer} answered {message.type.name} with {answer.type.name}"
                )
        except BaseException:
            await stream.reset()  # it must not give the next request an old answer
            raise
        await self._keep(stream)
        return answer

    async def _keep(self, stream: Stream) -> None:
        """Keep a stream for the next request; reset streams kept too long, or beyond the limit."""
        now = self._world.now()
        surplus = [self._idle.pop(stream.peer, None)]
        self._idle[stream.peer] = _Idle(stream, now + OUTBOUND_IDLE_SECONDS)
        while (
            len(self._idle) > OUTBOUND_STREAMS_MAX or next(iter(self._idle.values())).until <= now
        ):
            surplus.append(self._idle.popitem(last=False)[1])
        for idle in surplus:
            if idle is not None:
                await idle.stream.reset()

    def _late(self, to: Neighbour, message: Message) -> DeadlineError:
        return DeadlineError(
            f"{to.peer} did not answer {message.type.name} within {REQUEST_SECONDS_MAX:g} s"
        )


CONTACT_SILENT_SECONDS = 120.0
"""A contact silent for this long is checked; if it does not answer, others are not sent to it."""

SILENT_CHECKS_MAX = 4
"""Silent contacts checked per round of maintenance; in a large network lookups reach most."""

CHECK_AGAIN_SECONDS = 300.0
"""Shortest time between two checks of a peer that sends us requests (does it serve the DHT?)."""

CHECKS_MAX = 64
"""Peers waiting to be checked; further ones are dropped, and will send requests again."""

CHECKS_REMEMBERED_MAX = 4096
"""Peers whose last check is remembered, so that none is checked again too soon."""


Emit = Callable[..., None]
"""The type of `Events.emit`: a name, and fields."""


class Contacts:
    """A peer's routing table, updated by every answer and every failed request."""

    def __init__(self, transport: Transport, world: World, emit: Emit) -> None:
        self.peer_id = transport.peer_id
        self.table = RoutingTable(self.peer_id)
        self.transport = transport
        self.world = world
        self.emit = emit
        self.requests = Requests(transport, world)
        self._send_check, self._receive_check = trio.open_memory_channel[Neighbour](CHECKS_MAX)
        self._send_newcomer, self.newcomers = trio.open_memory_channel[PeerId](CHECKS_MAX)
        self._checked: Recent[PeerId, float] = Recent(CHECKS_REMEMBERED_MAX)

    def itself(self) -> Neighbour:
        return Neighbour(self.peer_id, tuple(self.transport.addresses()))

    async def lookup(
        self,
        kind: MessageType,
        key: bytes,
        *,
        hear: Callable[[Neighbour, Message], None] = lambda source, answer: None,
        enough: Callable[[], bool] = lambda: False,
    ) -> LookupResult:
        started = self.world.now()
        target = key_id(key)

        async def ask(neighbour: Neighbour) -> Sequence[Neighbour]:
            answer = await self.ask(neighbour, Message(kind, key))
            hear(neighbour, answer)
            return answer.closer_peers

        result = await Lookup(
            target, self.table.closest(target, BUCKET_SIZE), ask, own=self.peer_id, enough=enough
        ).run()
        for peer in result.late:
            self._note_failure(peer)
        self.emit(
            "dht.lookup_finished",
            kind=kind.name,
            key=key,
            hops=result.hops,
            asked=result.asked,
            failed=result.failed + len(result.late),
            timed_out=result.timed_out,
            seconds=self.world.now() - started,
        )
        return result

    async def ask(self, neighbour: Neighbour, message: Message) -> Message:
        """Send one request, and update the routing table from its outcome. Raises `PeerError`."""
        try:
            answer = await self._request(neighbour, message)
        except PeerError:
            self._note_failure(neighbour.peer)
            raise
        if neighbour.peer in self.table:
            self._note_answer(neighbour.peer, ())
        else:
            # It may have answered on a connection that it opened. A check asks the peer for its
            # own addresses, which replace those that others named.
            self._note_answer(neighbour.peer, neighbour.addresses)
            self.consider(neighbour)
        return answer

    async def _request(self, neighbour: Neighbour, message: Message) -> Message:
        """Send a request; a peer that resets GET_PROVIDERS, as JavaScript servers (kad-dht 16) do
        for a key that is no SHA-256 multihash, is sent FIND_NODE: it knows nearer peers."""
        try:
            return await self.requests.ask(neighbour, message)
        except StreamError:
            if message.type is not MessageType.GET_PROVIDERS:
                raise
        return await self.requests.ask(neighbour, Message(MessageType.FIND_NODE, message.key))

    # --- checking ----------------------------------------------------------------------------

    async def check_queued(self) -> None:
        async for neighbour in self._receive_check:
            try:
                await self.check(neighbour)
            except PeerError as error:
                self.emit("dht.check_failed", other=neighbour.peer, reason=str(error))

    async def check(self, neighbour: Neighbour, *, proven: tuple[str, ...] = ()) -> None:
        """Ask a peer for itself, which proves that it serves and names its addresses. Raises
        `PeerError`.

        `proven`: given by a person, kept even if not named, since a router may forward its port."""
        self._checked[neighbour.peer] = self.world.now()
        try:
            answer = await self.requests.ask(
                neighbour, Message(MessageType.FIND_NODE, peer_id_bytes(neighbour.peer))
            )
        except PeerError:
            self._note_failure(neighbour.peer)
            raise
        own_word = [
            named.addresses
            for named in answer.closer_peers
            if named.peer == neighbour.peer and named.addresses
        ]
        addresses = own_word[0] if own_word else neighbour.addresses
        self._note_answer(neighbour.peer, tuple(dict.fromkeys(proven + addresses)))

    def consider(self, neighbour: Neighbour) -> None:
        """Queue a check of a peer that is not a checked contact, unless one was made recently."""
        checked = self._checked.get(neighbour.peer)
        recently = self.world.now() - CHECK_AGAIN_SECONDS
        if neighbour.peer == self.peer_id or (checked is not None and checked > recently):
            return
        if checked is not None and neighbour.peer in self.table:
            return
        if not self.table.has_use_for(neighbour.peer, self.world.now()):
            return  # in a large network, nearly every peer
        self._queue_check(neighbour)

    def _queue_check(self, neighbour: Neighbour) -> None:
        try:
            self._send_check.send_nowait(neighbour)
        except trio.WouldBlock:
            return  # the queue is full: the peer will send requests again
        self._checked[neighbour.peer] = self.world.now()

    def _note_answer(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        known = peer in self.table
        if not addresses and not known:
            return  # a contact without addresses is of no use to others
        now = self.world.now()
        doubtful = self.table.answered(peer, addresses, now)
        if not known and peer in self.table:
            self.emit("dht.contact_added", other=peer, contacts=len(self.table))
            with contextlib.suppress(trio.WouldBlock):  # the next republish reaches it instead
                self._send_newcomer.send_nowait(peer)
        if doubtful is not None:
            last = self._checked.get(doubtful.peer)
            if last is None or now - last >= CONTACT_FRESH_SECONDS:
                self._queue_check(doubtful.neighbour)

    def _note_failure(self, peer: PeerId) -> None:
        if self.table.failed(peer):
            self.emit("dht.contact_removed", other=peer, contacts=len(self.table))

    def check_silent(self) -> None:
        """Queue checks of silent contacts: a peer that sends few requests, such as a bootstrap
        peer, would else keep naming contacts that have left."""
        silent = [c for c in self.table.contacts() if c.seen < self._heard_since()]
        silent.sort(key=lambda contact: (contact.failures, contact.seen))
        for contact in silent[:SILENT_CHECKS_MAX]:
            self._queue_check(contact.neighbour)

    def _heard_since(self) -> float:
        return self.world.now() - CONTACT_SILENT_SECONDS

    def closer(self, sender: PeerId, key: bytes) -> tuple[Neighbour, ...]:
        heard_since = self._heard_since()
        closest = self.table.closest(
            key_id(key), BUCKET_SIZE, exclude=sender, heard_since=heard_since
        )
        return tuple(closest)
