"""Publishing: stores records and provider records at the nearest peers, and republishes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import trio

from swarm.errors import PeerError
from swarm.kademlia.contacts import Contacts
from swarm.kademlia.lookup import LookupResult
from swarm.kademlia.providers import ProviderStore
from swarm.kademlia.records import Held, InvalidRecord, RecordStore, StoreFull, Validator
from swarm.kademlia.routing_table import BUCKET_SIZE, key_id, node_id
from swarm.kademlia.wire import Message, MessageType, Neighbour, Record
from swarm.wire.identity import PeerId

OWN_RECORDS_MAX = 1024
"""Own records, and provided keys, that this peer republishes (each kind)."""

REPUBLISH_SECONDS = 600.0
"""A publisher stores its records again after this: half of the holders may leave in between. A
holder does so with one that was not stored again for 1.5 to 2 intervals."""

REPUBLISHED_PER_ROUND_MAX = 16
"""Records of others republished in one round of maintenance."""

GIVERS = 2
"""The number of peers nearest to a key that give its record to a newcomer: one is enough (the
Kademlia paper); two in case one of them has not met the newcomer."""

GIVEN_MAX = 128
"""Records given to one newcomer. Its share is about k, like every peer's."""


@dataclass
class _Published:
    held: Held
    again_at: float


class Publisher:
    """Publishes this peer's records and provider records, and republishes those of others."""

    serving = False
    """Whether this peer holds records and providers for others."""

    def __init__(self, contacts: Contacts, validators: Mapping[str, Validator]) -> None:
        own_id = node_id(contacts.peer_id)
        self.records = RecordStore(validators, own_id, contacts.world.wall_time)
        self.providers = ProviderStore(own_id)
        self._contacts = contacts
        self._emit = contacts.emit
        self._world = contacts.world
        self._published: dict[bytes, _Published] = {}
        self._provided: dict[bytes, float] = {}

    async def put(self, key: bytes, value: bytes) -> int:
        """Store a record at the k peers nearest to its key, and again until it expires.

        A later `put` under the key replaces it. Returns the number of peers that hold it now,
        perhaps this one included. Raises `InvalidRecord` when our own validator refuses it,
        `StoreFull` beyond `OWN_RECORDS_MAX` keys."""
        held = self.records.validate(key, value)
        if len(self._published) >= OWN_RECORDS_MAX and key not in self._published:
            raise StoreFull(f"this peer publishes {len(self._published)} records already")
        self._published[key] = _Published(held, self.soon(1.0))
        return await self._publish(held)

    def withdraw(self, key: bytes) -> None:
        """Stop republishing a record of this peer; the copies at others expire."""
        self._published.pop(key, None)

    async def provide(self, key: bytes) -> int:
        """Announce this peer for a multihash (`provider_key`) until `stop_providing`; returns the
        number notified. Raises `StoreFull` beyond `OWN_RECORDS_MAX` keys."""
        if len(self._provided) >= OWN_RECORDS_MAX and key not in self._provided:
            raise StoreFull(f"this peer provides {len(self._provided)} keys already")
        self._provided[key] = self.soon(1.0)
        return await self._announce(key)

    def stop_providing(self, key: bytes) -> None:
        """Stop announcing this peer as a provider; the records at others expire."""
        self._provided.pop(key, None)

    async def store_at(self, neighbours: Sequence[Neighbour], held: Held) -> int:
        """Store a record at peers; returns the number of peers that stored it."""
        stored = 0

        async def store(neighbour: Neighbour) -> None:
            nonlocal stored
            message = Message(MessageType.PUT_VALUE, held.key, Record(held.key, held.value))
            try:
                answer = await self._contacts.ask(neighbour, message)
            except PeerError as error:
                self._emit("dht.store_failed", other=neighbour.peer, reason=str(error))
                return
            if answer.record is not None and answer.record.value == held.value:
                stored += 1
            else:
                self.believe(neighbour.peer, held.key, answer.record)

        async with trio.open_nursery() as nursery:
            for neighbour in neighbours:
                nursery.start_soon(store, neighbour)
        return stored

    def own_copy(self, key: bytes) -> Held | None:
        """The best record under a key among those we publish and those we hold for others."""
        copies = [self.records.get(key)]
        published = self._published.get(key)
        if published is not None:
            copies.append(
                self.believe(self._contacts.peer_id, key, Record(key, published.held.value))
            )
        known = (copy for copy in copies if copy is not None)
        return max(known, key=lambda held: held.rank, default=None)

    def believe(self, source: PeerId, key: bytes, record: Record | None) -> Held | None:
        """Validate a record that a peer sent for a key; reports an invalid one and returns None."""
        if record is None:
            return None
        try:
            if record.key != key:
                raise InvalidRecord("the record has another key")
            return self.records.validate(key, record.value)
        except InvalidRecord as error:
            self._emit("dht.record_disbelieved", other=source, reason=str(error))
            return None

    def keep(self, source: PeerId, key: bytes, value: bytes) -> Held | None:
        """Hold a record unless a better one is, which it returns; reports one that is refused."""
        try:
            return self.records.store(key, value, republish_at=self.soon(1.5))
        except (InvalidRecord, StoreFull) as error:
            self._emit("dht.record_refused", other=source, reason=str(error))
            return None

    # --- keeping alive -----------------------------------------------------------------------

    async def republish(self) -> None:
        now = self._world.now()
        for key, published in list(self._published.items()):
            # It may have been withdrawn, or replaced, while another one was published.
            if self._published.get(key) is not published or published.again_at > now:
                continue
            try:
                held = self.records.validate(key, published.held.value)
            except InvalidRecord as error:
                del self._published[key]
                self._emit("dht.own_record_ended", key=key, reason=str(error))
                continue
            published.again_at = self.soon(1.0)
            await self._publish(held)
        for key, again_at in list(self._provided.items()):
            if again_at <= now and key in self._provided:
                self._provided[key] = self.soon(1.0)
                await self._announce(key)
        for held in self.records.due(now)[:REPUBLISHED_PER_ROUND_MAX]:
            self.records.postpone(held.key, self.soon(1.5))
            if held.key not in self._published:
                await self._publish(held)

    async def give_to_newcomers(self) -> None:
        """Give new contacts the records near them, as lookups now ask these (the paper, 2.5)."""
        async for peer in self._contacts.newcomers:
            for held in self._owed_to(peer):
                contact = self._contacts.table.get(peer)
                if contact is None or not await self.store_at([contact.neighbour], held):
                    break

    def _owed_to(self, peer: PeerId) -> list[Held]:
        """Records that a new contact should hold and this peer has to give it."""
        owed = []
        for key in self.records.held_keys():
            target = key_id(key)
            if self._contacts.table.is_near(target, GIVERS, exclude=peer):
                nearest = self._contacts.table.closest(target, BUCKET_SIZE)
                held = self.records.get(key)
                if held is not None and any(each.peer == peer for each in nearest):
                    owed.append(held)
        return owed[:GIVEN_MAX]

    async def _publish(self, held: Held) -> int:
        """Store a record at the nearest peers, this one included; returns how many hold it."""
        result = await self._contacts.lookup(MessageType.FIND_NODE, held.key)
        local = self._is_holder(held.key, result)
        if local:
            self.keep(self._contacts.peer_id, held.key, held.value)
        stored = await self.store_at(result.closest, held) + local
        self._emit("dht.published", key=held.key, stored=stored, asked=len(result.closest) + local)
        return stored

    async def _announce(self, key: bytes) -> int:
        result = await self._contacts.lookup(MessageType.FIND_NODE, key)
        itself = self._contacts.itself()
        message = Message(MessageType.ADD_PROVIDER, key, provider_peers=(itself,))
        heard = 0
        if self._is_holder(key, result):
            heard += self.providers.add(key, itself, self._world.now())

        async def tell(neighbour: Neighbour) -> None:
            nonlocal heard
            try:
                await self._contacts.requests.tell(neighbour, message)
            except PeerError as error:
                self._emit("dht.announce_failed", other=neighbour.peer, reason=str(error))
            else:
                heard += 1

        async with trio.open_nursery() as nursery:
            for neighbour in result.closest:
                nursery.start_soon(tell, neighbour)
        self._emit("dht.announced", key=key, notified=heard)
        return heard

    def _is_holder(self, key: bytes, result: LookupResult) -> bool:
        if not self.serving:
            return False
        target = key_id(key)
        own = node_id(self._contacts.peer_id) ^ target
        return sum(node_id(n.peer) ^ target < own for n in result.closest) < BUCKET_SIZE

    def soon(self, intervals: float) -> float:
        """A time `intervals` to `intervals` + ½ republish intervals from now."""
        wait = intervals + 0.5 * self._world.random.random()
        return self._world.now() + wait * REPUBLISH_SECONDS
