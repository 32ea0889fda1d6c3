"""The DHT server: answers requests of others from the routing table and the stores."""

from __future__ import annotations

from collections import OrderedDict

import trio

from swarm.kademlia import wire
from swarm.kademlia.contacts import Contacts
from swarm.kademlia.publishing import Publisher
from swarm.kademlia.wire import (
    MESSAGE_BYTES_MAX,
    PEERS_PER_MESSAGE_MAX,
    Message,
    MessageType,
    Neighbour,
    Record,
)
from swarm.transport import Stream
from swarm.transport.rates import TokenBucket, TokenBuckets
from swarm.wire.identity import PeerId, peer_id_bytes

INBOUND_STREAMS_MAX = 256
"""Streams of others served at once; beyond it, the longest idle one is reset."""

INBOUND_IDLE_SECONDS = 60.0
"""A stream on which no request comes for this long is reset."""

REQUESTS_PER_SECOND = 200.0
"""Average requests of one /24 (IPv6: /48), or of one peer of a private address; more must wait. A
request takes some 0.2 ms, in which a peer does nothing else, and 16 KiB of an answer as long."""
REQUESTS_BURST = 4000.0
"""Requests at once: a hundred peers of one network that join make some twenty each."""
REQUEST_BYTES = 16 * 1024
NETWORKS_MAX = 4096
"""Networks and peers whose requests are counted; the least recent is forgotten."""


class Server:
    """Answers requests of others."""

    def __init__(self, contacts: Contacts, publisher: Publisher) -> None:
        self._contacts = contacts
        self._publisher = publisher
        self._emit = contacts.emit
        self._world = contacts.world
        self._inbound: OrderedDict[Stream, trio.CancelScope] = OrderedDict()
        self._rates = TokenBuckets(REQUESTS_PER_SECOND, REQUESTS_BURST, NETWORKS_MAX)

    def start(self) -> None:
        """Serve the protocol from now on."""
        self._contacts.transport.serve(
            wire.PROTOCOL, self._serve, frame_bytes_max=MESSAGE_BYTES_MAX
        )

    async def _serve(self, stream: Stream) -> None:
        """Answer requests until the peer ends the stream, breaks the protocol, or falls silent."""
        if not self._publisher.serving:
            await stream.reset()
            return
        if len(self._inbound) >= INBOUND_STREAMS_MAX:
            _, longest_idle = self._inbound.popitem(last=False)
            longest_idle.cancel()
        with trio.CancelScope() as scope:
            self._inbound[stream] = scope
            try:
                while True:
                    scope.deadline = trio.current_time() + INBOUND_IDLE_SECONDS
                    frame = await stream.receive()
                    if frame is None:
                        return
                    if stream in self._inbound:
                        self._inbound.move_to_end(stream)
                    if not self._publisher.serving:
                        break
                    await self._rate_of(stream.peer).spend(1)
                    answer = self.answer(stream.peer, wire.decode(frame))
                    self._contacts.consider(Neighbour(stream.peer))
                    if answer is not None:
                        raw = wire.encode(answer)
                        self._rate_of(stream.peer).borrow(
                            len(raw) / REQUEST_BYTES, trio.current_time()
                        )
                        await stream.send(raw)
            finally:
                self._inbound.pop(stream, None)
        await stream.reset()

    def _rate_of(self, peer: PeerId) -> TokenBucket:
        return self._rates.of(self._contacts.transport.network_of(peer) or peer)

    def answer(self, sender: PeerId, message: Message) -> Message | None:
        """The answer to one request; None for a request without an answer."""
        kind, key = message.type, message.key
        match kind:
            case MessageType.PING:
                return Message(MessageType.PING)
            case MessageType.FIND_NODE if key == peer_id_bytes(self._contacts.peer_id):
                return Message(kind, key, closer_peers=(self._contacts.itself(),))
            case MessageType.FIND_NODE:
                return Message(kind, key, closer_peers=self._contacts.closer(sender, key))
            case MessageType.GET_VALUE:
                held = self._publisher.records.get(key)
                record = Record(key, held.value) if held is not None else None
                return Message(kind, key, record, self._contacts.closer(sender, key))
            case MessageType.PUT_VALUE:
                return Message(kind, key, self._accept_record(sender, message))
            case MessageType.GET_PROVIDERS:
                providers = self._publisher.providers.sample(
                    key, PEERS_PER_MESSAGE_MAX, self._world.now(), self._world.random
                )
                return Message(
                    kind,
                    key,
                    closer_peers=self._contacts.closer(sender, key),
                    provider_peers=tuple(providers),
                )
            case MessageType.ADD_PROVIDER:
                for neighbour in message.provider_peers:
                    if neighbour.peer == sender:
                        self._publisher.providers.add(key, neighbour, self._world.now())
                return None

    def _accept_record(self, sender: PeerId, message: Message) -> Record | None:
        """Store a record unless a better one is held; returns the record then held under its key.

        The answer shows the sender whether its record was stored. (Go and JavaScript nodes compare
        it with the record that they sent.)
        """
        record = message.record
        if record is None or record.key != message.key:
            self._emit("dht.record_refused", other=sender, reason="the record has another key")
            return None
        held = self._publisher.keep(sender, record.key, record.value)
        return None if held is None else Record(held.key, held.value)
