"""The routing table: 256 buckets of k contacts, old live ones preferred (the Kademlia paper).

A peer becomes a contact only after it has *answered* a request on a stream that we opened. So
neither peers that liars invent nor peers that only make requests (clients) become contacts. Against
eclipse attacks, a bucket holds at most two contacts of one /24 (IPv4) or /64 (IPv6)."""

import functools
import hashlib
import ipaddress
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from swarm.kademlia.wire import ADDRESSES_PER_PEER_MAX, Neighbour
from swarm.wire.identity import PeerId, peer_id_bytes

BUCKET_SIZE = 20
"""k: contacts per bucket, and peers that store a record (the Kademlia paper's value)."""

PEERS_PER_GROUP_MAX = 2
"""Contacts of one bucket, or preferred answers of one lookup, within one /24 (IPv6: /64)."""

CONTACT_FAILURES_MAX = 2
"""Failed requests in a row after which a contact is dropped even without a replacement."""

CONTACT_FRESH_SECONDS = 300.0
"""The oldest contact of a full bucket is not pinged, when another peer could replace it, if it
answered or was connected this recently."""

ID_BITS = 256
_REPLACEMENTS_WANTED = 5
"""With this many replacements, a full bucket takes newcomers only if its oldest is stale."""


def key_id(key: bytes) -> int:
    """The id of a key: its SHA-256 as an integer. The distance of two ids is their XOR."""
    return int.from_bytes(hashlib.sha256(key).digest(), "big")


@functools.lru_cache(maxsize=65536)
def node_id(peer: PeerId) -> int:
    """The id of a peer: the SHA-256 of its multihash bytes."""
    return key_id(peer_id_bytes(peer))


def bucket_of(own: int, other: int) -> int:
    """Length of the common prefix, 0 (far) to 255 (near), of an id that differs from ours."""
    return ID_BITS - (own ^ other).bit_length()


@functools.lru_cache(maxsize=16384)
def _group_of(address: str) -> tuple[bool, str] | None:
    """(is public, network), of the relay if relayed; None for loopback and without a host."""
    parts = address.split("/")
    if len(parts) < 3:
        return None
    if parts[1] not in ("ip4", "ip6"):
        return (True, f"{parts[1]}/{parts[2]}") if parts[1].startswith("dns") else None
    try:
        ip = ipaddress.ip_address(parts[2])
    except ValueError:
        return None
    if ip.is_loopback:
        return None
    network = ipaddress.ip_network((ip, 24 if ip.version == 4 else 64), strict=False)
    return ip.is_global, str(network)


@functools.lru_cache(maxsize=16384)
def groups_of(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """A peer's networks, sorted; private ones, shared by many, only without a public one."""
    groups = [group for group in map(_group_of, addresses) if group is not None]
    public = any(is_public for is_public, _ in groups)
    return tuple(sorted({name for is_public, name in groups if is_public or not public}))


@dataclass
class Contact:
    peer: PeerId
    id: int
    addresses: tuple[str, ...]
    seen: float
    """When it last answered or was connected, on the world's clock."""
    failures: int = 0
    """Failed requests since its last answer."""
    _neighbour: Neighbour | None = None

    @property
    def neighbour(self) -> Neighbour:
        if self._neighbour is None or self._neighbour.addresses != self.addresses:
            self._neighbour = Neighbour(self.peer, self.addresses)
        return self._neighbour


@dataclass
class Bucket:
    contacts: dict[PeerId, Contact] = field(default_factory=dict)
    """Least recently seen first."""
    replacements: dict[PeerId, Contact] = field(default_factory=dict)
    """Peers that answered while the bucket was full; most recently seen last; at most k."""


class RoutingTable:
    """Contacts by distance. `now` is always a time on the world's clock."""

    def __init__(self, own: PeerId) -> None:
        self.own = own
        self.own_id = node_id(own)
        self._buckets: dict[int, Bucket] = {}
        self._contacts: dict[PeerId, Contact] = {}

    def __len__(self) -> int:
        return len(self._contacts)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._contacts

    def get(self, peer: PeerId) -> Contact | None:
        return self._contacts.get(peer)

    def contacts(self) -> list[Contact]:
        """All contacts, in the order in which they were added."""
        return list(self._contacts.values())

    def bucket(self, index: int) -> Bucket:
        bucket = self._buckets.get(index)
        if bucket is None:
            bucket = self._buckets[index] = Bucket()
        return bucket

    def answered(self, peer: PeerId, addresses: Sequence[str], now: float) -> Contact | None:
        """Refresh or add a peer that answered, or keep it as a replacement if its bucket, or its
        network's share of it, is full. Returns a full bucket's oldest contact if stale: the caller
        then pings it and reports `answered` or `failed`."""
        if peer == self.own:
            return None
        where = tuple(addresses)[:ADDRESSES_PER_PEER_MAX]
        bucket = self.bucket(bucket_of(self.own_id, node_id(peer)))
        # Out of the bucket first, so that it does not count against its own network's share.
        contact = bucket.contacts.pop(peer, None)
        if contact is not None and self._fits(bucket, where or contact.addresses):
            contact.seen, contact.failures = now, 0
            contact.addresses = where or contact.addresses
            bucket.contacts[peer] = contact
            return None
        if contact is not None:
            del self._contacts[peer]  # its new network already has its share of the bucket
        newcomer = Contact(peer, node_id(peer), where, now)
        if len(bucket.contacts) < BUCKET_SIZE and self._fits(bucket, where):
            bucket.replacements.pop(peer, None)
            self._add(bucket, newcomer)
            return None
        # Whoever answers cannot push a contact out, only wait for one to fail: otherwise an
        # attacker with many identities would soon hold the table.
        bucket.replacements.pop(peer, None)
        bucket.replacements[peer] = newcomer
        if len(bucket.replacements) > BUCKET_SIZE:
            del bucket.replacements[next(iter(bucket.replacements))]
        oldest = next(iter(bucket.contacts.values()))
        stale = now - oldest.seen >= CONTACT_FRESH_SECONDS
        # If only its network's share is full, the oldest contact is not what is in the way.
        return oldest if stale and len(bucket.contacts) >= BUCKET_SIZE else None

    def heard_of(self, peer: PeerId, now: float) -> None:
        """Note that a contact is connected. This does not reset its failed requests."""
        contact = self._contacts.get(peer)
        if contact is not None:
            contact.seen = now
            contacts = self.bucket(bucket_of(self.own_id, contact.id)).contacts
            contacts[peer] = contacts.pop(peer)

    def has_use_for(self, peer: PeerId, now: float) -> bool:
        """Whether a peer is a contact, or could become one or a replacement if it answered."""
        if peer in self._contacts:
            return True
        bucket = self.bucket(bucket_of(self.own_id, node_id(peer)))
        if len(bucket.contacts) < BUCKET_SIZE or len(bucket.replacements) < _REPLACEMENTS_WANTED:
            return True
        return now - next(iter(bucket.contacts.values())).seen >= CONTACT_FRESH_SECONDS

    def failed(self, peer: PeerId) -> bool:
        """Returns whether the contact was dropped: at once if a replacement fits, else after two
        failures in a row, so that a short outage of our own line does not empty the table."""
        if peer == self.own:
            return False
        bucket = self.bucket(bucket_of(self.own_id, node_id(peer)))
        bucket.replacements.pop(peer, None)
        # Out of the bucket before the search: its successor may be of the same network.
        contact = bucket.contacts.pop(peer, None)
        if contact is None:
            return False
        contact.failures += 1
        successor = next(
            (
                replacement
                for replacement in reversed(bucket.replacements.values())
                if self._fits(bucket, replacement.addresses)
            ),
            None,
        )
        if successor is None and contact.failures < CONTACT_FAILURES_MAX:
            # In front, as the one to be pinged and replaced next.
            bucket.contacts = {peer: contact, **bucket.contacts}
            return False
        del self._contacts[peer]
        if successor is not None:
            del bucket.replacements[successor.peer]
            self._add(bucket, successor)
        return True

    def closest(
        self,
        target: int,
        count: int,
        *,
        exclude: PeerId | None = None,
        heard_since: float = -math.inf,
    ) -> list[Neighbour]:
        """The nearest contacts, then those with failed requests, if seen since `heard_since`."""
        near: list[Contact] = []
        doubtful: list[Contact] = []
        for group in self._by_distance(target):
            group.sort(key=lambda contact: contact.id ^ target)
            for contact in group:
                if contact.peer == exclude:
                    continue
                if not contact.failures:
                    near.append(contact)
                elif contact.seen >= heard_since:
                    doubtful.append(contact)
            if len(near) >= count:
                break
        return [contact.neighbour for contact in (near + doubtful)[:count]]

    def is_near(self, target: int, count: int, *, exclude: PeerId) -> bool:
        """Whether fewer than `count` contacts, without `exclude`, are nearer to an id than we."""
        if target == self.own_id:
            return True
        # Exactly the contacts in the target's bucket are nearer to it than we are.
        bucket = self._buckets.get(bucket_of(self.own_id, target))
        if bucket is None:
            return True
        return len(bucket.contacts) - (exclude in bucket.contacts) < count

    def _by_distance(self, target: int) -> Iterator[list[Contact]]:
        """All contacts in groups, each nearer to `target` than the next: its bucket, then all
        buckets nearer to us together, then the farther ones one by one (as far from us)."""
        indices = sorted(self._buckets, reverse=True)
        own = bucket_of(self.own_id, target) if target != self.own_id else ID_BITS
        if own in self._buckets:
            yield list(self._buckets[own].contacts.values())
        yield [
            contact
            for index in indices
            if index > own
            for contact in self._buckets[index].contacts.values()
        ]
        for index in indices:
            if index < own:
                yield list(self._buckets[index].contacts.values())

    def _fits(self, bucket: Bucket, addresses: tuple[str, ...]) -> bool:
        groups = groups_of(addresses)
        if not groups:
            return True
        others = [groups_of(contact.addresses) for contact in bucket.contacts.values()]
        return all(
            sum(group in other for other in others) < PEERS_PER_GROUP_MAX for group in groups
        )

    def _add(self, bucket: Bucket, contact: Contact) -> None:
        bucket.contacts[contact.peer] = contact
        self._contacts[contact.peer] = contact
