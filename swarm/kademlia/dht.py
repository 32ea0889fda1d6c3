"""One peer's part in the DHT, as libp2p's kad-dht under `/swarm/kad/1.0.0`
(docs/protocol/kademlia.md), over the transport seam: on real sockets and in virtual time."""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

import trio

from swarm.errors import PeerError
from swarm.kademlia import wire
from swarm.kademlia.contacts import Contacts, Emit
from swarm.kademlia.publishing import Publisher
from swarm.kademlia.records import Held, Validator
from swarm.kademlia.routing_table import BUCKET_SIZE
from swarm.transport import ConnectError, Stream, Transport
from swarm.transport.rates import TokenBucket, TokenBuckets
from swarm.wire.identity import InvalidPeerId, PeerId, peer_id_bytes, public_key_of
from swarm.world import World

QUORUM = 11
"""Valid copies after which a read may stop: the majority of k, so that it shares a holder with a
write that reached most of them."""

REFRESH_SECONDS = 1800.0
"""Between two lookups of our own id: they find our neighbourhood, and make us known in it."""

EXPLORE_SECONDS = 300.0
"""Between two lookups of random ids, which fill the far buckets. A lookup costs about 25 requests
of a few milliseconds, so an idle peer should make few."""

MAINTENANCE_SECONDS = 30.0
"""Mean time between two rounds of maintenance: refresh, republish, expire."""

CHECKERS = 4
"""Peers checked at once."""


class Kademlia(Publisher):
    """Serves others and maintains its state only while `run` is running.

    `validators`: by namespace (`"swarm-run"` for keys `/swarm-run/…`). Without `server`, or while
    `serving` is false, the peer is a client: it serves nobody and enters nobody's table, which
    takes only peers that answered on a stream opened *to* them."""

    def __init__(
        self,
        transport: Transport,
        world: World,
        validators: Mapping[str, Validator],
        *,
        server: bool = True,
        emit: Emit = lambda name, **fields: None,
    ) -> None:
        super().__init__(Contacts(transport, world, emit), validators)
        self.peer_id = transport.peer_id
        self.serving = self._ever_serves = server
        self._transport = transport
        self.table = self._contacts.table
        self._server = Server(self._contacts, self)
        self._bootstrap_addresses: tuple[str, ...] = ()
        self._looked_around = self._explored = world.now()

    # --- requests ---------------------------------------------------------------------------

    async def bootstrap(self, addresses: Sequence[str], others: Sequence[str] = ()) -> int:
        """Join the DHT through multiaddrs ending in `/p2p/<id>` (else `ValueError`), `others`
        later; returns the number of contacts. Raises `ConnectError` with each reason."""
        neighbours = [_parse(address) for address in addresses]
        self._bootstrap_addresses = tuple(dict.fromkeys([*others, *addresses]))
        reasons: list[str] = []

        async def check(neighbour: wire.Neighbour) -> None:
            try:
                await self._contacts.check(neighbour, proven=neighbour.addresses)
            except PeerError as error:
                reasons.append(f"{neighbour.addresses[0]}: {error}")

        async with trio.open_nursery() as nursery:
            for neighbour in neighbours:
                if neighbour.peer != self.peer_id:
                    nursery.start_soon(check, neighbour)
        if not len(self.table) and reasons:
            raise ConnectError("no bootstrap peer answers: " + "; ".join(sorted(reasons)))
        await self._look_around()
        return len(self.table)

    async def find_peer(self, peer: PeerId) -> tuple[str, ...]:
        """A peer's addresses, empty if unknown: those that it names itself if it serves the DHT and
        answers, else those that others name, unproven, the most frequent first."""
        if peer == self.peer_id:
            return tuple(self._transport.addresses())
        own_word: list[tuple[str, ...]] = []
        said: Counter[str] = Counter()

        def hear(source: wire.Neighbour, answer: wire.Message) -> None:
            for neighbour in answer.closer_peers:
                if neighbour.peer == peer:
                    said.update(neighbour.addresses)
                    if source.peer == peer:
                        own_word.append(neighbour.addresses)
            if source.peer == peer:
                own_word.append(source.addresses)

        await self._contacts.lookup(
            wire.MessageType.FIND_NODE,
            peer_id_bytes(peer),
            hear=hear,
            enough=lambda: bool(own_word),
        )
        for addresses in own_word:
            if addresses:
                return addresses
        return tuple(address for address, _ in said.most_common(wire.ADDRESSES_PER_PEER_MAX))

    async def get(self, key: bytes) -> bytes | None:
        """The best record of the peers nearest to the key, asked until `QUORUM` gave a valid one or
        all k were, and of this peer. It is stored where there was an older one, or none if all were
        asked."""
        copies: dict[PeerId, Held | None] = {}
        valid = 0

        def hear(source: wire.Neighbour, answer: wire.Message) -> None:
            nonlocal valid
            copies[source.peer] = self.believe(source.peer, key, answer.record)
            valid += copies[source.peer] is not None

        def enough() -> bool:
            return valid >= QUORUM

        result = await self._contacts.lookup(
            wire.MessageType.GET_VALUE, key, hear=hear, enough=enough
        )
        opinions = [copy for copy in (*copies.values(), self.own_copy(key)) if copy is not None]
        if not opinions:
            return None
        best = max(opinions, key=lambda held: held.rank)
        if self.records.get(key) is not None:
            self.keep(self.peer_id, key, best.value)
        behind = [
            neighbour
            for neighbour in result.closest
            if (copy := copies.get(neighbour.peer)) != best and (copy is not None or not enough())
        ]
        if behind:
            repaired = await self.store_at(behind, best)
            self._emit("dht.repaired", key=key, behind=len(behind), repaired=repaired)
        return best.value

    async def find_providers(
        self, key: bytes, limit: int = wire.PEERS_PER_MESSAGE_MAX
    ) -> list[wire.Neighbour]:
        """At most `limit` providers, those named by most holders first. The lookup ends early only
        if two holders each named `limit`, so that one liar cannot fill the answer."""
        named: dict[PeerId, wire.Neighbour] = {}
        votes: Counter[PeerId] = Counter()

        def count(providers: Sequence[wire.Neighbour]) -> None:
            for provider in providers:
                held = named.get(provider.peer)
                if held is None or not held.addresses:
                    named[provider.peer] = provider
                votes[provider.peer] += 1

        now = self._world.now()
        count(self.providers.sample(key, wire.PEERS_PER_MESSAGE_MAX, now, self._world.random))
        await self._contacts.lookup(
            wire.MessageType.GET_PROVIDERS,
            key,
            hear=lambda source, answer: count(answer.provider_peers),
            enough=lambda: sum(vote >= 2 for vote in votes.values()) >= limit,
        )
        return [named[peer] for peer, _ in votes.most_common(limit)]

    # --- running ----------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve (unless a client) and maintain contacts and records, until cancelled."""
        if self._ever_serves:
            self._server.start()
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(CHECKERS):
                    nursery.start_soon(self._contacts.check_queued)
                nursery.start_soon(self.give_to_newcomers)
                nursery.start_soon(self._maintain)
                task_status.started()
        finally:
            await self._contacts.requests.close()

    async def _maintain(self) -> None:
        while True:
            # Jitter: peers that started together shall not all work at the same moment.
            await trio.sleep(MAINTENANCE_SECONDS * (0.75 + 0.5 * self._world.random.random()))
            self.records.expire()
            self.providers.expire(self._world.now())
            if not len(self.table) and self._bootstrap_addresses:
                try:
                    await self.bootstrap(self._bootstrap_addresses)
                except ConnectError as error:
                    self._emit("dht.bootstrap_failed", reason=str(error))
                    continue
            await self._meet_bootstrap_peers()
            await self.republish()
            await self._refresh()
            for peer in self._transport.connected():
                self.table.heard_of(peer, self._world.now())
            self._contacts.check_silent()

    async def _meet_bootstrap_peers(self) -> None:
        """Connect again to bootstrap peers that restarted: they know nobody, so that those who join
        through them would form a separate network. The total rate is the same at any size."""
        for neighbour in map(_parse, self._bootstrap_addresses):
            known = neighbour.peer == self.peer_id or neighbour.peer in self._transport.connected()
            my_turn = self._world.random.random() * len(self.table) < BUCKET_SIZE
            if known or not my_turn:
                continue
            try:
                await self._contacts.check(neighbour, proven=neighbour.addresses)
            except PeerError as error:
                self._emit("dht.bootstrap_failed", reason=str(error))

    async def _refresh(self) -> None:
        """Make at most one lookup: for our own id, or for a random one."""
        now = self._world.now()
        if now - self._looked_around >= REFRESH_SECONDS:
            await self._look_around()
        elif now - self._explored >= EXPLORE_SECONDS and len(self.table) >= BUCKET_SIZE:
            self._explored = now
            # It has the form of a peer id, because some nodes parse the key of a request.
            key = peer_id_bytes(self.peer_id)[:6] + self._world.random.randbytes(32)
            await self._contacts.lookup(wire.MessageType.FIND_NODE, key)

    async def _look_around(self) -> None:
        """Look up our own id: that finds our neighbourhood, and makes us known in it."""
        self._looked_around = self._world.now()
        await self._contacts.lookup(wire.MessageType.FIND_NODE, peer_id_bytes(self.peer_id))


def _parse(address: str) -> wire.Neighbour:
    """Parse a multiaddr that ends in a peer id; raises `ValueError`."""
    peer = address.rpartition("/p2p/")[2] if "/p2p/" in address else ""
    try:
        public_key_of(peer)
    except InvalidPeerId as error:
        raise ValueError(f"the address {address!r} does not end in /p2p/<peer id>") from error
    return wire.Neighbour(PeerId(peer), (address,))


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
            wire.PROTOCOL, self._serve, frame_bytes_max=wire.MESSAGE_BYTES_MAX
        )

    async def _serve(self, stream: Stream) -> None:
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
                    self._contacts.consider(wire.Neighbour(stream.peer))
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

    def answer(self, sender: PeerId, message: wire.Message) -> wire.Message | None:
        """The answer to one request; None for a request without an answer."""
        kind, key = message.type, message.key
        match kind:
            case wire.MessageType.PING:
                return wire.Message(wire.MessageType.PING)
            case wire.MessageType.FIND_NODE if key == peer_id_bytes(self._contacts.peer_id):
                return wire.Message(kind, key, closer_peers=(self._contacts.itself(),))
            case wire.MessageType.FIND_NODE:
                return wire.Message(kind, key, closer_peers=self._contacts.closer(sender, key))
            case wire.MessageType.GET_VALUE:
                held = self._publisher.records.get(key)
                record = wire.Record(key, held.value) if held is not None else None
                return wire.Message(kind, key, record, self._contacts.closer(sender, key))
            case wire.MessageType.PUT_VALUE:
                return wire.Message(kind, key, self._accept_record(sender, message))
            case wire.MessageType.GET_PROVIDERS:
                providers = self._publisher.providers.sample(
                    key, wire.PEERS_PER_MESSAGE_MAX, self._world.now(), self._world.random
                )
                return wire.Message(
                    kind,
                    key,
                    closer_peers=self._contacts.closer(sender, key),
                    provider_peers=tuple(providers),
                )
            case wire.MessageType.ADD_PROVIDER:
                for neighbour in message.provider_peers:
                    if neighbour.peer == sender:
                        self._publisher.providers.add(key, neighbour, self._world.now())
                return None

    def _accept_record(self, sender: PeerId, message: wire.Message) -> wire.Record | None:
        """Store a record unless a better one is held; returns the one then held, as the answer
        shows it: Go and JavaScript nodes compare it with what they sent."""
        record = message.record
        if record is None or record.key != message.key:
            self._emit("dht.record_refused", other=sender, reason="the record has another key")
            return None
        held = self._publisher.keep(sender, record.key, record.value)
        return None if held is None else wire.Record(held.key, held.value)
