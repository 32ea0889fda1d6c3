"""One peer's part in the DHT: serving, asking, and keeping table and records alive.

libp2p's kad-dht wire under `/swarm/kad/1.0.0` (docs/protocol/kademlia.md), written once over the
transport seam, so that it runs on real sockets and in virtual time alike.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from swarm import defaults
from swarm.errors import PeerError
from swarm.identity import InvalidPeerId, PeerId, peer_id_bytes, public_key_of
from swarm.kademlia import wire
from swarm.kademlia.lookup import Lookup, LookupResult
from swarm.kademlia.providers import ProviderStore
from swarm.kademlia.records import Held, InvalidRecord, RecordStore, StoreFull, Validator
from swarm.kademlia.requests import Requests
from swarm.kademlia.routing_table import RoutingTable, key_id, node_id
from swarm.kademlia.wire import Connection, Message, MessageType, Neighbour, Record
from swarm.transport import ConnectError, Framing, Stream, StreamError, Transport
from swarm.world import World

_CHECKERS = 4
_REPUBLISHED_PER_ROUND_MAX = 16
_REMEMBERED_CHECKS_MAX = 4096
_GIVERS = 2
"""The nearest peers to a key give its record to a newcomer: one would do (the Kademlia paper), two
do when one of them has not met the newcomer."""
_GIVEN_MAX = 128
"""Records given to one newcomer; it should hold about k, everybody's share."""


class Emit(Protocol):
    """`Events.emit`."""

    def __call__(self, name: str, /, **fields: object) -> None: ...


def _silent(name: str, /, **fields: object) -> None:
    """For callers that do not look at events."""


def _accept_any(address: str) -> bool:
    return True


@dataclass(frozen=True)
class PutResult:
    stored: int
    """Peers that now hold the record, this one included if it is among the nearest."""
    asked: int
    """Peers that should: the k nearest that answered, and this one likewise."""
    newer: bytes | None
    """A better record that somebody holds under the key: look at it before putting again."""
    hops: int

    @property
    def done(self) -> bool:
        """A majority of the holders has it, so that a quorum read finds it."""
        return self.stored > self.asked // 2


@dataclass
class _Published:
    held: Held
    again_at: float


class Kademlia:
    """A DHT peer. `run` must be running for others to be served and for anything to be refreshed.

    `validators` by namespace (`"swarm-run"` for keys `/swarm-run/…`). With `server=False` it is a
    client: it asks and publishes but serves nobody, so it never enters another's table, which takes
    only peers that have answered on a stream opened *to* them; a server turns into one while
    `serving` is false. `accept_address` says whether an address somebody names may be dialled at
    all.
    """

    def __init__(
        self,
        transport: Transport,
        world: World,
        validators: Mapping[str, Validator],
        *,
        server: bool = True,
        emit: Emit = _silent,
        accept_address: Callable[[str], bool] = _accept_any,
        k: int = defaults.DHT_BUCKET_SIZE,
        paths: int = defaults.DHT_PATHS,
    ) -> None:
        self.peer_id = transport.peer_id
        self.table = RoutingTable(self.peer_id, k=k)
        self.records = RecordStore(validators, node_id(self.peer_id), world.wall_time)
        self.providers = ProviderStore(node_id(self.peer_id))
        self._transport = transport
        self._world = world
        self._server = server
        self.serving = server
        self._emit = emit
        self._accept_address = accept_address
        self._k = k
        self._paths = paths
        self._requests = Requests(transport, world)
        self._published: dict[bytes, _Published] = {}
        self._provided: dict[bytes, float] = {}
        self._bootstrap_addresses: tuple[str, ...] = ()
        self._send_check, self._receive_check = trio.open_memory_channel[Neighbour](
            defaults.DHT_CHECKS_MAX
        )
        self._send_newcomer, self._receive_newcomer = trio.open_memory_channel[PeerId](
            defaults.DHT_CHECKS_MAX
        )
        self._looked_around = world.now()
        self._checked: OrderedDict[PeerId, float] = OrderedDict()
        self._inbound: OrderedDict[Stream, trio.CancelScope] = OrderedDict()

    # --- what a peer asks of the DHT --------------------------------------------------------

    async def bootstrap(self, addresses: Sequence[str], others: Sequence[str] = ()) -> int:
        """Join through known peers (multiaddrs ending in `/p2p/<id>`); how many contacts we have.
        `others` are not waited for, and met later on.

        Raises `ValueError` for an address without a peer id, and `ConnectError`, naming each
        address and its reason, when none of them answers.
        """
        neighbours = [_parse(address) for address in addresses]
        self._bootstrap_addresses = tuple(dict.fromkeys([*others, *addresses]))
        reasons: list[str] = []

        async def check(neighbour: Neighbour) -> None:
            try:
                await self._check(neighbour, proven=neighbour.addresses)
            except PeerError as error:
                reasons.append(f"{neighbour.addresses[0]}: {error}")

        async with trio.open_nursery() as nursery:
            for neighbour in neighbours:
                if neighbour.peer != self.peer_id:
                    nursery.start_soon(check, neighbour)
        if not len(self.table) and reasons:
            raise ConnectError("no bootstrap peer answers: " + "; ".join(sorted(reasons)))
        # The far buckets are filled by `run`, one now and then: a newcomer that looked all of them
        # up at once would open a hundred connections.
        await self._look_around()
        return len(self.table)

    async def closest(self, key: bytes) -> list[Neighbour]:
        """The k peers nearest to a key that answer now."""
        return (await self._lookup(MessageType.FIND_NODE, key)).closest

    async def find_peer(self, peer: PeerId) -> tuple[str, ...]:
        """Where a peer is, or empty.

        Its own word if it serves the DHT and answers. Otherwise what others say, most often said
        first: connecting proves or refutes it.
        """
        if peer == self.peer_id:
            return tuple(self._transport.addresses())
        own_word: list[tuple[str, ...]] = []
        said: Counter[str] = Counter()

        def hear(source: Neighbour, answer: Message) -> None:
            for neighbour in self._neighbours(answer.closer_peers):
                if neighbour.peer == peer:
                    said.update(neighbour.addresses)
                    if source.peer == peer:
                        own_word.append(neighbour.addresses)
            if source.peer == peer:
                own_word.append(source.addresses)

        await self._lookup(
            MessageType.FIND_NODE, peer_id_bytes(peer), hear=hear, enough=lambda: bool(own_word)
        )
        for addresses in own_word:
            if addresses:
                return addresses
        most = said.most_common(defaults.DHT_ADDRESSES_PER_PEER_MAX)
        return tuple(address for address, _ in most)

    async def put(self, key: bytes, value: bytes) -> PutResult:
        """Store a record at the k peers nearest to its key, and again until it expires.

        A later `put` under the key replaces it. Raises `InvalidRecord` when our own validator
        refuses it, `StoreFull` beyond `DHT_OWN_RECORDS_MAX` keys.
        """
        held = self.records.validate(key, value)
        if len(self._published) >= defaults.DHT_OWN_RECORDS_MAX and key not in self._published:
            raise StoreFull(f"this peer publishes {len(self._published)} records already")
        self._published[key] = _Published(held, self._soon(1.0))
        return await self._publish(held)

    def withdraw(self, key: bytes) -> None:
        """Republish a record of ours no longer; the copies out there expire."""
        self._published.pop(key, None)

    async def get(self, key: bytes, *, quorum: int = defaults.DHT_QUORUM) -> bytes | None:
        """The best record under a key, or None.

        Asks the peers nearest to the key until `quorum` of them gave a valid record or all k
        were asked; our own copy is one more opinion, and alone only when nobody can be asked. Then
        gives the best to those that showed an older one (or none, if all k were asked).
        """
        copies: dict[PeerId, Held | None] = {}
        valid = 0

        def hear(source: Neighbour, answer: Message) -> None:
            nonlocal valid
            copies[source.peer] = self._believe(source.peer, key, answer.record)
            valid += copies[source.peer] is not None

        def enough() -> bool:
            return valid >= quorum

        result = await self._lookup(MessageType.GET_VALUE, key, hear=hear, enough=enough)
        opinions = [copy for copy in (*copies.values(), self._own_copy(key)) if copy is not None]
        if not opinions:
            return None
        best = max(opinions, key=lambda held: held.rank)
        if self.records.get(key) is not None:
            self._keep(best)
        behind = [
            neighbour
            for neighbour in result.closest
            if (copy := copies.get(neighbour.peer)) != best and (copy is not None or not enough())
        ]
        if behind:
            repaired, _ = await self._store_at(behind, best)
            self._emit("dht.repaired", key=key, behind=len(behind), repaired=repaired)
        return best.value

    async def provide(self, key: bytes) -> int:
        """Tell the k peers nearest to `key` that we have it, and again until `stop_providing`.

        `key` is a multihash (`provider_key`). Returns how many heard it. Raises `StoreFull` beyond
        `DHT_OWN_RECORDS_MAX` keys.
        """
        if len(self._provided) >= defaults.DHT_OWN_RECORDS_MAX and key not in self._provided:
            raise StoreFull(f"this peer provides {len(self._provided)} keys already")
        self._provided[key] = self._soon(1.0)
        return await self._announce(key)

    def stop_providing(self, key: bytes) -> None:
        """Announce it no longer; what others remember expires."""
        self._provided.pop(key, None)

    async def find_providers(
        self, key: bytes, limit: int = defaults.DHT_PEERS_PER_MESSAGE_MAX
    ) -> list[Neighbour]:
        """At most `limit` peers said to have `key`, each once, those named by most holders first.

        Ends early only when `limit` of them were named by two holders each, so that one liar
        cannot fill the answer.
        """
        named: dict[PeerId, Neighbour] = {}
        votes: Counter[PeerId] = Counter()

        def count(providers: Sequence[Neighbour]) -> None:
            for provider in providers:
                held = named.get(provider.peer)
                if held is None or not held.addresses:
                    named[provider.peer] = provider
                votes[provider.peer] += 1

        now = self._world.now()
        limit_own = defaults.DHT_PEERS_PER_MESSAGE_MAX
        count(self.providers.sample(key, limit_own, now, self._world.random))
        await self._lookup(
            MessageType.GET_PROVIDERS,
            key,
            hear=lambda source, answer: count(self._neighbours(answer.provider_peers)),
            enough=lambda: sum(vote >= 2 for vote in votes.values()) >= limit,
        )
        return [named[peer] for peer, _ in votes.most_common(limit)]

    # --- running ----------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve (unless a client), check contacts, refresh, republish, expire; until cancelled."""
        if self._server:
            self._transport.serve(
                wire.PROTOCOL,
                self._serve,
                Framing.DELIMITED,
                frame_bytes_max=defaults.DHT_MESSAGE_BYTES_MAX,
            )
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(_CHECKERS):
                    nursery.start_soon(self._check_queued)
                nursery.start_soon(self._give_to_newcomers)
                nursery.start_soon(self._maintain)
                task_status.started()
        finally:
            await self._requests.close()

    async def _check_queued(self) -> None:
        async for neighbour in self._receive_check:
            try:
                await self._check(neighbour)
            except PeerError as error:
                self._emit("dht.check_failed", other=neighbour.peer, reason=str(error))

    async def _give_to_newcomers(self) -> None:
        """Give new contacts the records that are theirs to hold (the Kademlia paper, 2.5), since
        whoever looks for them will ask the newcomers, not those that were nearest before."""
        async for peer in self._receive_newcomer:
            for held in self._owed_to(peer):
                contact = self.table.get(peer)
                if contact is None or not (await self._store_at([contact.neighbour], held))[0]:
                    break

    def _owed_to(self, peer: PeerId) -> list[Held]:
        """Records of which a new contact should be a holder, and this peer is to tell it."""
        owed = []
        for key in self.records.held_keys():
            target = key_id(key)
            if self.table.is_near(target, _GIVERS, exclude=peer):
                nearest = self.table.closest(target, self._k)
                held = self.records.get(key)
                if held is not None and any(each.peer == peer for each in nearest):
                    owed.append(held)
        return owed[:_GIVEN_MAX]

    async def _maintain(self) -> None:
        while True:
            # Jittered, so that peers started together do not all work at the same moment.
            await trio.sleep(
                defaults.DHT_MAINTENANCE_SECONDS * (0.75 + 0.5 * self._world.random.random())
            )
            self.records.expire()
            self.providers.expire(self._world.now())
            if not len(self.table) and self._bootstrap_addresses:
                try:
                    await self.bootstrap(self._bootstrap_addresses)
                except ConnectError as error:
                    self._emit("dht.bootstrap_failed", reason=str(error))
                    continue
            await self._meet_bootstrap_peers()
            await self._republish()
            await self._refresh()
            for peer in self._transport.connected():
                self.table.heard_of(peer, self._world.now())
            self._check_silent()

    def _check_silent(self) -> None:
        """Whoever asks little, as a bootstrap peer does, would name peers that are long gone."""
        silent = [c for c in self.table.contacts() if c.seen < self._heard_since()]
        silent.sort(key=lambda contact: (contact.failures, contact.seen))
        for contact in silent[: defaults.DHT_SILENT_CHECKS_MAX]:
            self._queue_check(contact.neighbour)

    def _heard_since(self) -> float:
        return self._world.now() - defaults.DHT_CONTACT_SILENT_SECONDS

    async def _meet_bootstrap_peers(self) -> None:
        """Connect again to bootstrap peers that were away: one that came back knows nobody, and
        all that join through it would be a network of their own. In a large network everybody
        does so more rarely, and all together as often."""
        for neighbour in map(_parse, self._bootstrap_addresses):
            known = neighbour.peer == self.peer_id or neighbour.peer in self._transport.connected()
            my_turn = self._world.random.random() * len(self.table) < self._k
            if known or not my_turn:
                continue
            try:
                await self._check(neighbour, proven=neighbour.addresses)
            except PeerError as error:
                self._emit("dht.bootstrap_failed", reason=str(error))

    async def _republish(self) -> None:
        now = self._world.now()
        for key, published in list(self._published.items()):
            if published.again_at > now:
                continue
            try:
                held = self.records.validate(key, published.held.value)
            except InvalidRecord as error:
                del self._published[key]
                self._emit("dht.own_record_ended", key=key, reason=str(error))
                continue
            published.again_at = self._soon(1.0)
            await self._publish(held)
        for key, again_at in list(self._provided.items()):
            if again_at <= now and key in self._provided:
                self._provided[key] = self._soon(1.0)
                await self._announce(key)
        for held in self.records.due(now)[:_REPUBLISHED_PER_ROUND_MAX]:
            self.records.postpone(held.key, self._soon(1.5))
            if held.key not in self._published:
                await self._publish(held)

    async def _refresh(self) -> None:
        """At most one lookup: of ourselves, or into the farthest bucket that needs one."""
        now = self._world.now()
        if now - self._looked_around >= defaults.DHT_REFRESH_SECONDS:
            await self._look_around()
            return
        for index in self.table.to_refresh(now, defaults.DHT_REFRESH_SECONDS)[:1]:
            key = self.table.random_key(index, self._world.random)
            await self._lookup(MessageType.FIND_NODE, key)

    async def _look_around(self) -> None:
        """Look ourselves up: that finds our neighbourhood, and makes us known in it."""
        self._looked_around = self._world.now()
        await self._lookup(MessageType.FIND_NODE, peer_id_bytes(self.peer_id))

    # --- serving ----------------------------------------------------------------------------

    async def _serve(self, stream: Stream) -> None:
        """Answer requests until the peer ends the stream, breaks the protocol, or falls silent."""
        if not self.serving:
            await stream.reset()
            return
        if len(self._inbound) >= defaults.DHT_INBOUND_STREAMS_MAX:
            _, longest_idle = self._inbound.popitem(last=False)
            longest_idle.cancel()
        with trio.CancelScope() as scope:
            self._inbound[stream] = scope
            try:
                while True:
                    scope.deadline = trio.current_time() + defaults.DHT_INBOUND_IDLE_SECONDS
                    frame = await stream.receive()
                    if frame is None:
                        return
                    if stream in self._inbound:
                        self._inbound.move_to_end(stream)
                    if not self.serving:
                        break
                    answer = self._answer(stream.peer, wire.decode(frame))
                    self._consider(Neighbour(stream.peer))
                    if answer is not None:
                        await stream.send(wire.encode(answer))
            finally:
                self._inbound.pop(stream, None)
        await stream.reset()

    def _answer(self, sender: PeerId, message: Message) -> Message | None:
        kind, key = message.type, message.key
        match kind:
            case MessageType.PING:
                return Message(MessageType.PING)
            case MessageType.FIND_NODE if key == peer_id_bytes(self.peer_id):
                itself = Neighbour(self.peer_id, tuple(self._transport.addresses()))
                return Message(kind, key, closer_peers=(wire.peer_to_wire(itself),))
            case MessageType.FIND_NODE:
                return Message(kind, key, closer_peers=self._closer(sender, key))
            case MessageType.GET_VALUE:
                held = self.records.get(key)
                record = Record(key, held.value) if held is not None else None
                return Message(kind, key, record, self._closer(sender, key))
            case MessageType.PUT_VALUE:
                return Message(kind, key, self._accept_record(sender, message))
            case MessageType.GET_PROVIDERS:
                providers = self.providers.sample(
                    key, defaults.DHT_PEERS_PER_MESSAGE_MAX, self._world.now(), self._world.random
                )
                return Message(
                    kind,
                    key,
                    closer_peers=self._closer(sender, key),
                    provider_peers=tuple(wire.peer_to_wire(peer) for peer in providers),
                )
            case MessageType.ADD_PROVIDER:
                for neighbour in self._neighbours(message.provider_peers):
                    if neighbour.peer == sender:
                        self.providers.add(key, neighbour, self._world.now())
                return None

    def _accept_record(self, sender: PeerId, message: Message) -> Record | None:
        """What is held under the key afterwards: the sender sees by it whether its record stands.
        (Go and JavaScript nodes compare it with what they sent.)"""
        record = message.record
        if record is None or record.key != message.key:
            self._emit("dht.record_refused", other=sender, reason="the record has another key")
            return None
        try:
            held = self.records.store(record.key, record.value, republish_at=self._soon(1.5))
        except (InvalidRecord, StoreFull) as error:
            self._emit("dht.record_refused", other=sender, reason=str(error))
            return None
        return Record(held.key, held.value)

    def _closer(self, sender: PeerId, key: bytes) -> tuple[wire.Peer, ...]:
        closest = self.table.closest(
            key_id(key), self._k, exclude=sender, heard_since=self._heard_since()
        )
        return tuple(wire.peer_to_wire(peer, Connection.CAN_CONNECT) for peer in closest)

    # --- asking -----------------------------------------------------------------------------

    async def _lookup(
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
            answer = await self._ask(neighbour, Message(kind, key))
            hear(neighbour, answer)
            return self._neighbours(answer.closer_peers)

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

    async def _ask(self, neighbour: Neighbour, message: Message) -> Message:
        """One request, and what it teaches about the peer. Raises `PeerError`."""
        try:
            answer = await self._request(neighbour, message)
        except PeerError:
            self._note_failure(neighbour.peer)
            raise
        if neighbour.peer in self.table:
            self._note_answer(neighbour.peer, ())
        else:
            # It may have answered on a connection it had to us: what it says itself about where
            # it is replaces what others said.
            self._note_answer(neighbour.peer, neighbour.addresses)
            self._consider(neighbour)
        return answer

    async def _request(self, neighbour: Neighbour, message: Message) -> Message:
        """The answer; from a peer that resets GET_PROVIDERS, the contacts it has near the key.

        JavaScript servers (kad-dht 16) take the key for a whole CID and reset unless it is a
        SHA-256 multihash. They hold no providers of such a key, but they still know the way.
        """
        try:
            return await self._requests.ask(neighbour, message)
        except StreamError:
            if message.type is not MessageType.GET_PROVIDERS:
                raise
        return await self._requests.ask(neighbour, Message(MessageType.FIND_NODE, message.key))

    async def _check(self, neighbour: Neighbour, *, proven: tuple[str, ...] = ()) -> None:
        """Ask a peer for itself: proves that it serves, and says where. Raises `PeerError`.

        `proven` addresses (a person gave them) stay even if the peer does not know them: a router
        may forward its port.
        """
        self._remember_check(neighbour.peer)
        try:
            answer = await self._requests.ask(
                neighbour, Message(MessageType.FIND_NODE, peer_id_bytes(neighbour.peer))
            )
        except PeerError:
            self._note_failure(neighbour.peer)
            raise
        own_word = [
            named.addresses
            for named in self._neighbours(answer.closer_peers)
            if named.peer == neighbour.peer and named.addresses
        ]
        addresses = own_word[0] if own_word else neighbour.addresses
        self._note_answer(neighbour.peer, tuple(dict.fromkeys(proven + addresses)))

    def _consider(self, neighbour: Neighbour) -> None:
        """A peer that is no checked contact turned up: have it checked, not too often."""
        checked = self._checked.get(neighbour.peer)
        recently = self._world.now() - defaults.DHT_CHECK_AGAIN_SECONDS
        if neighbour.peer == self.peer_id or (checked is not None and checked > recently):
            return
        if checked is not None and neighbour.peer in self.table:
            return
        if not self.table.has_use_for(neighbour.peer, self._world.now()):
            return  # in a large network nearly everybody
        self._queue_check(neighbour)

    def _queue_check(self, neighbour: Neighbour) -> None:
        try:
            self._send_check.send_nowait(neighbour)
        except trio.WouldBlock:
            return  # it will turn up again
        self._remember_check(neighbour.peer)

    def _remember_check(self, peer: PeerId) -> None:
        self._checked[peer] = self._world.now()
        self._checked.move_to_end(peer)
        if len(self._checked) > _REMEMBERED_CHECKS_MAX:
            self._checked.popitem(last=False)

    def _note_answer(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        known = peer in self.table
        if not addresses and not known:
            return  # nobody could be sent there
        now = self._world.now()
        doubtful = self.table.answered(peer, addresses, now)
        if not known and peer in self.table:
            self._emit("dht.contact_added", other=peer, contacts=len(self.table))
            with contextlib.suppress(trio.WouldBlock):  # the next republish makes up for it
                self._send_newcomer.send_nowait(peer)
        if doubtful is not None:
            last = self._checked.get(doubtful.peer)
            if last is None or now - last >= defaults.DHT_CONTACT_FRESH_SECONDS:
                self._queue_check(doubtful.neighbour)

    def _note_failure(self, peer: PeerId) -> None:
        if self.table.failed(peer):
            self._emit("dht.contact_removed", other=peer, contacts=len(self.table))

    def _neighbours(self, peers: Sequence[wire.Peer]) -> list[Neighbour]:
        """Peers somebody named, with the addresses that may be dialled."""
        found = wire.peers_from_wire(peers)
        if self._accept_address is _accept_any:
            return found
        return [
            Neighbour(each.peer, tuple(filter(self._accept_address, each.addresses)))
            for each in found
        ]

    # --- records and providers ----------------------------------------------------------------

    async def _publish(self, held: Held) -> PutResult:
        result = await self._lookup(MessageType.FIND_NODE, held.key)
        local = self._is_holder(held.key, result)
        if local:
            self._keep(held)
        stored, newer = await self._store_at(result.closest, held)
        outcome = PutResult(
            stored + local,
            len(result.closest) + local,
            newer.value if newer is not None else None,
            result.hops,
        )
        self._emit("dht.published", key=held.key, stored=outcome.stored, asked=outcome.asked)
        return outcome

    async def _store_at(
        self, neighbours: Sequence[Neighbour], held: Held
    ) -> tuple[int, Held | None]:
        """(how many took it, the best that somebody has instead)."""
        stored = 0
        newer: Held | None = None

        async def store(neighbour: Neighbour) -> None:
            nonlocal stored, newer
            message = Message(MessageType.PUT_VALUE, held.key, Record(held.key, held.value))
            try:
                answer = await self._ask(neighbour, message)
            except PeerError as error:
                self._emit("dht.store_failed", other=neighbour.peer, reason=str(error))
                return
            if answer.record is not None and answer.record.value == held.value:
                stored += 1
                return
            other = self._believe(neighbour.peer, held.key, answer.record)
            if other is not None and other.rank > max(held, newer or held, key=_rank).rank:
                newer = other

        async with trio.open_nursery() as nursery:
            for neighbour in neighbours:
                nursery.start_soon(store, neighbour)
        return stored, newer

    async def _announce(self, key: bytes) -> int:
        result = await self._lookup(MessageType.FIND_NODE, key)
        itself = Neighbour(self.peer_id, tuple(self._transport.addresses()))
        message = Message(
            MessageType.ADD_PROVIDER, key, provider_peers=(wire.peer_to_wire(itself),)
        )
        told = 0
        if self._is_holder(key, result):
            told += self.providers.add(key, itself, self._world.now())

        async def tell(neighbour: Neighbour) -> None:
            nonlocal told
            try:
                await self._requests.tell(neighbour, message)
            except PeerError as error:
                self._emit("dht.announce_failed", other=neighbour.peer, reason=str(error))
            else:
                told += 1

        async with trio.open_nursery() as nursery:
            for neighbour in result.closest:
                nursery.start_soon(tell, neighbour)
        self._emit("dht.announced", key=key, told=told)
        return told

    def _believe(self, source: PeerId, key: bytes, record: Record | None) -> Held | None:
        """A record somebody showed, if it is one for this key; says so when it is not."""
        if record is None:
            return None
        try:
            if record.key != key:
                raise InvalidRecord("the record has another key")
            return self.records.validate(key, record.value)
        except InvalidRecord as error:
            self._emit("dht.record_disbelieved", other=source, reason=str(error))
            return None

    def _own_copy(self, key: bytes) -> Held | None:
        """The best of what we publish and what we hold for others."""
        copies = [self.records.get(key)]
        published = self._published.get(key)
        if published is not None:
            copies.append(self._believe(self.peer_id, key, Record(key, published.held.value)))
        return max((copy for copy in copies if copy is not None), key=_rank, default=None)

    def _keep(self, held: Held) -> None:
        try:
            self.records.store(held.key, held.value, republish_at=self._soon(1.5))
        except (InvalidRecord, StoreFull) as error:
            self._emit("dht.record_refused", other=self.peer_id, reason=str(error))

    def _is_holder(self, key: bytes, result: LookupResult) -> bool:
        """Whether this peer belongs to the k nearest itself."""
        if not self.serving:
            return False
        target = key_id(key)
        own = node_id(self.peer_id) ^ target
        return sum(node_id(n.peer) ^ target < own for n in result.closest) < self._k

    def _soon(self, intervals: float) -> float:
        """A time `intervals` to `intervals` + ½ republish intervals from now."""
        wait = intervals + 0.5 * self._world.random.random()
        return self._world.now() + wait * defaults.DHT_REPUBLISH_SECONDS


def _rank(held: Held) -> tuple[int, bytes]:
    return held.rank


def _parse(address: str) -> Neighbour:
    """The peer at a multiaddr that ends in its id; raises `ValueError`."""
    _, found, peer = address.rpartition("/p2p/")
    try:
        public_key_of(peer)
    except InvalidPeerId as error:
        raise ValueError(f"the address {address!r} does not end in /p2p/<peer id>") from error
    if not found:
        raise ValueError(f"the address {address!r} does not end in /p2p/<peer id>")
    return Neighbour(PeerId(peer), (address,))
