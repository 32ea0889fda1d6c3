"""The messages of libp2p's kad-dht, as protobuf (libp2p specs, kad-dht r0), bounded and typed.

The codec is written by hand because the generated classes import all of libp2p (300 modules, 2 s),
and simulations run thousands of peers. Unknown fields are skipped, as protobuf demands.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import multiaddr
import multiaddr.exceptions

from swarm.errors import PeerError
from swarm.transport.framing import encode_varint
from swarm.wire.identity import InvalidPeerId, PeerId, peer_id_bytes, peer_id_from_bytes

MESSAGE_BYTES_MAX = 128 * 1024
"""Room for one record (64 KiB), or two lists of 20 peers with 16 addresses of 192 bytes each."""

RECORD_BYTES_MAX = 64 * 1024
"""A record's value is an envelope."""

KEY_BYTES_MAX = 256
"""Room for `/swarm-run/<peer id>/<name>`; a provider key is a multihash of 34 bytes."""

PEERS_PER_MESSAGE_MAX = 20
"""Peers read from one list of a message: k."""

ADDRESSES_PER_PEER_MAX = 16
"""Addresses read per peer; an honest peer has a few per interface."""

ADDRESS_BYTES_MAX = 192
"""Longest binary multiaddr; a relayed WebTransport address has about 170 bytes."""

PROTOCOL = "/swarm/kad/1.0.0"


class WireError(PeerError):
    """Bytes from the network are not a kad-dht message within the limits."""


class MessageType(enum.IntEnum):
    PUT_VALUE = 0
    GET_VALUE = 1
    ADD_PROVIDER = 2
    GET_PROVIDERS = 3
    FIND_NODE = 4
    PING = 5


class Connection(enum.IntEnum):
    """What the sender of a peer knows about its reachability."""

    NOT_CONNECTED = 0
    CONNECTED = 1
    CAN_CONNECT = 2
    CANNOT_CONNECT = 3


@dataclass(frozen=True)
class Record:
    key: bytes = b""
    value: bytes = b""


@dataclass(frozen=True)
class Peer:
    """A peer as encoded in a message: multihash bytes and binary multiaddrs, all unverified."""

    id: bytes
    addresses: tuple[bytes, ...] = ()
    connection: Connection = Connection.NOT_CONNECTED

    @functools.cached_property
    def encoded(self) -> bytes:
        """Its protobuf encoding, cached: the same few hundred peers are in every answer."""
        encoded = _bytes_field(1, self.id) if self.id else b""
        encoded += b"".join(_bytes_field(2, address) for address in self.addresses)
        if self.connection:
            encoded += bytes((3 << 3, self.connection))
        return encoded

    @functools.cached_property
    def neighbour(self) -> Neighbour | None:
        """The decoded peer; None if it cannot be a Swarm peer (its id is not Ed25519)."""
        try:
            peer = peer_id_from_bytes(self.id)
        except InvalidPeerId:
            return None
        texts = (_address_from_wire(raw, peer) for raw in self.addresses)
        return Neighbour(peer, tuple(dict.fromkeys(text for text in texts if text)))


@dataclass(frozen=True)
class Message:
    type: MessageType
    key: bytes = b""
    record: Record | None = None
    closer_peers: tuple[Peer, ...] = ()
    provider_peers: tuple[Peer, ...] = ()


@dataclass(frozen=True)
class Neighbour:
    """A peer and the addresses named for it: a decoded `Peer`."""

    peer: PeerId
    addresses: tuple[str, ...] = ()
    """Multiaddrs ending in `/p2p/<peer>`."""

    @functools.cached_property
    def contact(self) -> Peer:
        """Its description for others when it is a contact of ours, cached."""
        return peer_to_wire(self, Connection.CAN_CONNECT)


# --- protobuf ---------------------------------------------------------------------------------

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
"""Sizes in bytes of the fields of fixed width."""

_PEERS_CACHED = 16384
"""Peers whose translation is cached: the same few hundred are in every answer, and translating them
again took half the time."""


def _decode_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if position >= len(data):
            raise WireError("a kad-dht message ends within a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, position
    raise WireError("a number in a kad-dht message has more than 64 bits")


def _bytes_field(number: int, value: bytes) -> bytes:
    """One length-delimited field; field numbers up to 15 have a one-byte tag."""
    size = len(value)
    if size < 0x80:
        return bytes((number << 3 | _BYTES, size)) + value
    return bytes((number << 3 | _BYTES,)) + encode_varint(size) + value


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(number, integer, bytes) of each varint or bytes field; fixed-width ones are skipped."""
    position, end = 0, len(data)
    while position < end:
        tag = data[position]  # nearly all numbers have one byte: read those without a call
        if tag < 0x80:
            position += 1
        else:
            tag, position = _decode_varint(data, position)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise WireError(f"a kad-dht message has a field number {number}")
        if kind == _BYTES:
            if position < end and data[position] < 0x80:
                size = data[position]
                position += 1
            else:
                size, position = _decode_varint(data, position)
            if size > end - position:
                raise WireError("a kad-dht message ends within a field")
            yield number, -1, data[position : position + size]
            position += size
        elif kind == _VARINT:
            value, position = _decode_varint(data, position)
            yield number, value, b""
        elif kind in _FIXED:
            position += _FIXED[kind]
            if position > end:
                raise WireError("a kad-dht message ends within a field")
        else:
            raise WireError(f"a kad-dht message has a field of unknown kind {kind}")


def _want_bytes(name: str, integer: int, value: bytes, bytes_max: int) -> bytes:
    if integer != -1:
        raise WireError(f"{name} in a kad-dht message is a number, not bytes")
    if len(value) > bytes_max:
        raise WireError(f"{name} in a kad-dht message has {len(value)} bytes, at most {bytes_max}")
    return value


def _want_integer(name: str, integer: int) -> int:
    if integer == -1:
        raise WireError(f"{name} in a kad-dht message is bytes, not a number")
    return integer


@functools.lru_cache(maxsize=_PEERS_CACHED)
def _decode_peer(data: bytes) -> Peer:
    identifier, connection = b"", Connection.NOT_CONNECTED
    addresses: list[bytes] = []
    for number, integer, value in _fields(data):
        if number == 1:
            identifier = _want_bytes("a peer id", integer, value, 128)
        elif number == 2:
            _want_bytes("an address", integer, value, len(value))
            # Skip addresses that are too long or too many: Go nodes list all their addresses.
            if len(value) <= ADDRESS_BYTES_MAX and len(addresses) < ADDRESSES_PER_PEER_MAX:
                addresses.append(value)
        elif number == 3:
            known = _want_integer("a connection type", integer)
            connection = Connection(known) if known <= 3 else Connection.NOT_CONNECTED
    return Peer(identifier, tuple(addresses), connection)


def _encode_record(record: Record) -> bytes:
    encoded = b""
    for number, value in ((1, record.key), (2, record.value)):
        if value:
            encoded += _bytes_field(number, value)
    return encoded


def _decode_record(data: bytes) -> Record:
    key = content = b""
    for number, integer, value in _fields(data):
        if number == 1:
            key = _want_bytes("a record's key", integer, value, KEY_BYTES_MAX)
        elif number == 2:
            content = _want_bytes("a record's value", integer, value, RECORD_BYTES_MAX)
    return Record(key, content)


def encode(message: Message) -> bytes:
    """Encode a message as protobuf, fields in ascending order. Raises `WireError` if too large."""
    parts = []
    if message.type:
        parts.append(bytes((1 << 3, message.type)))
    if message.key:
        parts.append(_bytes_field(2, message.key))
    if message.record is not None:
        parts.append(_bytes_field(3, _encode_record(message.record)))
    parts.extend(_bytes_field(8, peer.encoded) for peer in message.closer_peers)
    parts.extend(_bytes_field(9, peer.encoded) for peer in message.provider_peers)
    # A frame must not be empty, but a PUT_VALUE without fields would be: write its type.
    encoded = b"".join(parts) or b"\x08\x00"
    if len(encoded) > MESSAGE_BYTES_MAX:
        raise WireError(f"a kad-dht message of {len(encoded)} bytes is too large to send")
    return encoded


def decode(data: bytes) -> Message:
    """Decode a message from the network. Raises `WireError`.

    Peers beyond 20 per list and addresses beyond 16 per peer are skipped, not refused, since
    generic nodes send them (a Go node adds the target to its k closest, and lists all providers).
    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise WireError(f"a kad-dht message has {len(data)} bytes, at most {MESSAGE_BYTES_MAX}")
    kind, key, record = 0, b"", None
    peers: dict[int, list[Peer]] = {8: [], 9: []}
    for number, integer, value in _fields(data):
        if number in peers:
            _want_bytes("a peer", integer, value, len(value))
            if len(peers[number]) < PEERS_PER_MESSAGE_MAX:
                peers[number].append(_decode_peer(value))
        elif number == 1:
            kind = _want_integer("the type", integer)
        elif number == 2:
            key = _want_bytes("the key", integer, value, KEY_BYTES_MAX)
        elif number == 3:
            record = _decode_record(_want_bytes("the record", integer, value, len(value)))
    try:
        message_type = MessageType(kind)
    except ValueError as error:
        raise WireError(f"a kad-dht message has the unknown type {kind}") from error
    return Message(message_type, key, record, tuple(peers[8]), tuple(peers[9]))


# --- peers and addresses ------------------------------------------------------------------------


def _address_to_wire(address: str, peer: str) -> bytes | None:
    """Binary multiaddr without the final `/p2p/<peer>`: a message has the id in its own field."""
    try:
        raw: bytes = multiaddr.Multiaddr(address.removesuffix(f"/p2p/{peer}")).to_bytes()
    except (ValueError, LookupError, multiaddr.exceptions.Error):
        return None
    return raw if 0 < len(raw) <= ADDRESS_BYTES_MAX else None


def _address_from_wire(raw: bytes, peer: str) -> str | None:
    """Text ending in `/p2p/<peer>`; None for an unknown multiaddr or one naming another peer."""
    try:
        parsed = multiaddr.Multiaddr(raw)
        address = str(parsed)
        # The parser pads truncated values: accept only bytes that it would write itself.
        if not address or multiaddr.Multiaddr(address).to_bytes() != raw:
            return None
    except (ValueError, LookupError, TypeError, multiaddr.exceptions.Error):
        return None
    if address.endswith(f"/p2p/{peer}"):
        return address
    last_hop = address.rpartition("/p2p/")
    if last_hop[1] and "/" not in last_hop[2]:
        return None
    return f"{address}/p2p/{peer}"


@functools.lru_cache(maxsize=_PEERS_CACHED)
def peer_to_wire(neighbour: Neighbour, connection: Connection = Connection.NOT_CONNECTED) -> Peer:
    """Translate a peer for a message to others. Addresses that are no multiaddrs are left out."""
    addresses = [_address_to_wire(text, neighbour.peer) for text in neighbour.addresses]
    known = [raw for raw in addresses if raw is not None]
    return Peer(peer_id_bytes(neighbour.peer), tuple(known[:ADDRESSES_PER_PEER_MAX]), connection)


def peers_from_wire(peers: Sequence[Peer]) -> list[Neighbour]:
    """Decode the peers with Ed25519 ids, which Swarm peers have, and their readable addresses.

    Each peer is returned once.
    """
    found: dict[PeerId, Neighbour] = {}
    for peer in peers:
        neighbour = peer.neighbour
        if neighbour is not None:
            found.setdefault(neighbour.peer, neighbour)
    return list(found.values())
