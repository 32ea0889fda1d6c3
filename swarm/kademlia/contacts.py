"""The contacts of a DHT peer: requests to them, checks of them, and lookups through them."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable

import trio

from swarm.errors import PeerError
from swarm.kademlia import wire
from swarm.kademlia.lookup import Lookup, LookupResult
from swarm.kademlia.requests import Requests
from swarm.kademlia.routing_table import BUCKET_SIZE, CONTACT_FRESH_SECONDS, RoutingTable, key_id
from swarm.kademlia.wire import Message, MessageType, Neighbour
from swarm.transport import StreamError, Transport
from swarm.wire.identity import PeerId, peer_id_bytes
from swarm.world import World

CONTACT_SILENT_SECONDS = 120.0
"""A contact silent for this long is checked; if it does not answer, others are not sent to it."""

SILENT_CHECKS_MAX = 4
"""Silent contacts checked in one round of maintenance; in a large network lookups reach most
contacts."""

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
        self._checked: OrderedDict[PeerId, float] = OrderedDict()

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

        async def ask(neighbour: Neighbour) -> list[Neighbour]:
            answer = await self.ask(neighbour, Message(kind, key))
            hear(neighbour, answer)
            return wire.peers_from_wire(answer.closer_peers)

        result = await Lookup(
            target, self.table.closest(target, BUCKET_SIZE), ask, own=self.peer_id, enough=enough
        ).run()
        for peer in result.late:
            self._note_failure(peer)
        self.table.touch(target, self.world.now())
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
        """Send a request; a peer that resets GET_PROVIDERS is sent FIND_NODE for the key instead.

        JavaScript servers (kad-dht 16) read the key as a whole CID and reset the stream unless it
        is a SHA-256 multihash. They hold no providers of such a key, but know peers nearer to it.
        """
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
        """Look a peer up at the peer itself: its answer proves that it serves, and names its
        addresses. Raises `PeerError`.

        `proven` addresses, given by a person, are kept even if the peer does not name them: a
        router may forward its port.
        """
        self._remember_check(neighbour.peer)
        try:
            answer = await self.requests.ask(
                neighbour, Message(MessageType.FIND_NODE, peer_id_bytes(neighbour.peer))
            )
        except PeerError:
            self._note_failure(neighbour.peer)
            raise
        own_word = [
            named.addresses
            for named in wire.peers_from_wire(answer.closer_peers)
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
        self._remember_check(neighbour.peer)

    def _remember_check(self, peer: PeerId) -> None:
        self._checked[peer] = self.world.now()
        self._checked.move_to_end(peer)
        if len(self._checked) > CHECKS_REMEMBERED_MAX:
            self._checked.popitem(last=False)

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

    def closer(self, sender: PeerId, key: bytes) -> tuple[wire.Peer, ...]:
        closest = self.table.closest(
            key_id(key), BUCKET_SIZE, exclude=sender, heard_since=self._heard_since()
        )
        return tuple(neighbour.contact for neighbour in closest)
