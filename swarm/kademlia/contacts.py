"""The contacts of a DHT peer: requests to them, checks of them, and lookups through them."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from swarm.errors import PeerError
from swarm.identity import PeerId, peer_id_bytes
from swarm.kademlia import wire
from swarm.kademlia.lookup import Lookup, LookupResult
from swarm.kademlia.requests import Requests
from swarm.kademlia.routing_table import CONTACT_FRESH_SECONDS, RoutingTable, key_id
from swarm.kademlia.wire import Connection, Message, MessageType, Neighbour
from swarm.transport import StreamError, Transport
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


class Emit(Protocol):
    """The type of `Events.emit`."""

    def __call__(self, name: str, /, **fields: object) -> None: ...


def silent(name: str, /, **fields: object) -> None:
    """Discard an event."""


def accept_any(address: str) -> bool:
    return True


class Contacts:
    """A peer's routing table, updated by every answer and every failed request."""

    def __init__(
        self,
        transport: Transport,
        world: World,
        *,
        emit: Emit,
        accept_address: Callable[[str], bool],
        k: int,
        paths: int,
    ) -> None:
        self.peer_id = transport.peer_id
        self.table = RoutingTable(self.peer_id, k=k)
        self.requests = Requests(transport, world)
        self._world = world
        self._emit = emit
        self._accept_address = accept_address
        self._k = k
        self._paths = paths
        self._send_check, self._receive_check = trio.open_memory_channel[Neighbour](CHECKS_MAX)
        self._send_newcomer, self.newcomers = trio.open_memory_channel[PeerId](CHECKS_MAX)
        self._checked: OrderedDict[PeerId, float] = OrderedDict()

    async def lookup(
        self,
        kind: MessageType,
        key: bytes,
        *,
        hear: Callable[[Neighbour, Message], None] = lambda source, answer: None,
        enough: Callable[[], bool] = lambda: False,
    ) -> LookupResult:
        started = self._world.now()
        target = key_id(key)

        async def ask(neighbour: Neighbour) -> list[Neighbour]:
            answer = await self.ask(neighbour, Message(kind, key))
            hear(neighbour, answer)
            return self.neighbours(answer.closer_peers)

        result = await Lookup(
            target,
            self.table.closest(target, self._k),
            ask,
            own=self.peer_id,
            enough=enough,
            k=self._k,
            paths=self._paths,
        ).run()
        for peer in result.late:
            self._note_failure(peer)
        self.table.touch(target, self._world.now())
        self._emit(
            "dht.lookup_finished",
            kind=kind.name,
            key=key,
            hops=result.hops,
            asked=result.asked,
            failed=result.failed + len(result.late),
            timed_out=result.timed_out,
            seconds=self._world.now() - started,
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
                self._emit("dht.check_failed", other=neighbour.peer, reason=str(error))

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
            for named in self.neighbours(answer.closer_peers)
            if named.peer == neighbour.peer and named.addresses
        ]
        addresses = own_word[0] if own_word else neighbour.addresses
        self._note_answer(neighbour.peer, tuple(dict.fromkeys(proven + addresses)))

    def consider(self, neighbour: Neighbour) -> None:
        """Queue a check of a peer that is not a checked contact, unless one was made recently."""
        checked = self._checked.get(neighbour.peer)
        recently = self._world.now() - CHECK_AGAIN_SECONDS
        if neighbour.peer == self.peer_id or (checked is not None and checked > recently):
            return
        if checked is not None and neighbour.peer in self.table:
            return
        if not self.table.has_use_for(neighbour.peer, self._world.now()):
            return  # in a large network, nearly every peer
        self._queue_check(neighbour)

    def _queue_check(self, neighbour: Neighbour) -> None:
        try:
            self._send_check.send_nowait(neighbour)
        except trio.WouldBlock:
            return  # the queue is full: the peer will send requests again
        self._remember_check(neighbour.peer)

    def _remember_check(self, peer: PeerId) -> None:
        self._checked[peer] = self._world.now()
        self._checked.move_to_end(peer)
        if len(self._checked) > CHECKS_REMEMBERED_MAX:
            self._checked.popitem(last=False)

    def _note_answer(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        known = peer in self.table
        if not addresses and not known:
            return  # a contact without addresses is of no use to others
        now = self._world.now()
        doubtful = self.table.answered(peer, addresses, now)
        if not known and peer in self.table:
            self._emit("dht.contact_added", other=peer, contacts=len(self.table))
            with contextlib.suppress(trio.WouldBlock):  # the next republish reaches it instead
                self._send_newcomer.send_nowait(peer)
        if doubtful is not None:
            last = self._checked.get(doubtful.peer)
            if last is None or now - last >= CONTACT_FRESH_SECONDS:
                self._queue_check(doubtful.neighbour)

    def _note_failure(self, peer: PeerId) -> None:
        if self.table.failed(peer):
            self._emit("dht.contact_removed", other=peer, contacts=len(self.table))

    def check_silent(self) -> None:
        """Queue checks of silent contacts: a peer that sends few requests, such as a bootstrap
        peer, would else keep naming contacts that have left."""
        silent = [c for c in self.table.contacts() if c.seen < self._heard_since()]
        silent.sort(key=lambda contact: (contact.failures, contact.seen))
        for contact in silent[:SILENT_CHECKS_MAX]:
            self._queue_check(contact.neighbour)

    def _heard_since(self) -> float:
        return self._world.now() - CONTACT_SILENT_SECONDS

    def closer(self, sender: PeerId, key: bytes) -> tuple[wire.Peer, ...]:
        closest = self.table.closest(
            key_id(key), self._k, exclude=sender, heard_since=self._heard_since()
        )
        return tuple(wire.peer_to_wire(peer, Connection.CAN_CONNECT) for peer in closest)

    def neighbours(self, peers: Sequence[wire.Peer]) -> list[Neighbour]:
        """Peers that another peer named, with those of their addresses that may be dialled."""
        found = wire.peers_from_wire(peers)
        if self._accept_address is accept_any:
            return found
        return [
            Neighbour(each.peer, tuple(filter(self._accept_address, each.addresses)))
            for each in found
        ]
