"""The messages of libp2p's kad-dht, as protobuf (libp2p specs, kad-dht r0), bounded and typed."""

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import multiaddr
import multiaddr.exceptions
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from swarm.errors import PeerError
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


@dataclass(frozen=True)
class Record:
    key: bytes = b""
    value: bytes = b""


@dataclass(frozen=True)
class Neighbour:
    """A peer and the addresses named for it, unverified."""

    peer: PeerId
    addresses: tuple[str, ...] = ()
    """Multiaddrs ending in `/p2p/<peer>`."""

    @functools.cached_property
    def encoded(self) -> bytes:
        """Its protobuf encoding, cached: the same few hundred peers are in every answer. Addresses
        that are no multiaddrs are left out."""
        addresses = [_address_to_wire(text, self.peer) for text in self.addresses]
        known = [raw for raw in addresses if raw is not None][:ADDRESSES_PER_PEER_MAX]
        written = _Peer(id=peer_id_bytes(self.peer), addrs=known, connection=CAN_CONNECT)
        encoded: bytes = written.SerializeToString()
        return encoded


@dataclass(frozen=True)
class Message:
    type: MessageType
    key: bytes = b""
    record: Record | None = None
    closer_peers: tuple[Neighbour, ...] = ()
    provider_peers: tuple[Neighbour, ...] = ()
    """Peers with Ed25519 ids, which Swarm peers have, each once."""


CAN_CONNECT = 2
"""What a message says about the sender's connection to a peer in it. Nobody here reads it."""

# --- protobuf ---------------------------------------------------------------------------------

_PEERS_CACHED = 16384
"""Peers whose translation is cached: the same few hundred are in every answer; translating took
half the time."""


def _classes() -> tuple[type[Any], type[Any]]:
    """The classes of `wire.textproto`: libp2p's own would import all of it (300 modules, 2 s).
    Peers are bytes here, so that their translations can be cached."""
    file = FileDescriptorProto()
    text_format.Parse(Path(__file__).with_suffix(".textproto").read_bytes(), file)
    pool = DescriptorPool()
    pool.Add(file)
    message, peer = map(pool.FindMessageTypeByName, ("Message", "Peer"))
    return GetMessageClass(message), GetMessageClass(peer)


_Message, _Peer = _classes()


def _parsed(kind: type[Any], data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise WireError(f"these {len(data)} bytes are no kad-dht message") from error


def _bounded(name: str, value: bytes, bytes_max: int) -> bytes:
    if len(value) > bytes_max:
        raise WireError(f"{name} in a kad-dht message has {len(value)} bytes, at most {bytes_max}")
    return value


def encode(message: Message) -> bytes:
    """Encode a message as protobuf, fields in ascending order. Raises `WireError` if too large."""
    written = _Message(
        type=message.type,
        key=message.key,
        closer=[peer.encoded for peer in message.closer_peers],
        providers=[peer.encoded for peer in message.provider_peers],
    )
    if message.record is not None:
        written.record.SetInParent()
        written.record.key, written.record.value = message.record.key, message.record.value
    # A frame must not be empty, but a PUT_VALUE without fields would be: write its type.
    encoded: bytes = written.SerializeToString() or b"\x08\x00"
    if len(encoded) > MESSAGE_BYTES_MAX:
        raise WireError(f"a kad-dht message of {len(encoded)} bytes is too large to send")
    return encoded


def decode(data: bytes) -> Message:
    """Raises `WireError`. Peers beyond 20 per list and addresses beyond 16 per peer are skipped,
    since generic nodes send them (a Go node lists all providers)."""
    _bounded("the whole", data, MESSAGE_BYTES_MAX)
    found = _parsed(_Message, data)
    try:
        kind = MessageType(found.type)
    except ValueError as error:
        raise WireError(f"a kad-dht message has the unknown type {found.type}") from error
    record = None
    if found.HasField("record"):
        record = Record(
            _bounded("a record's key", found.record.key, KEY_BYTES_MAX),
            _bounded("a record's value", found.record.value, RECORD_BYTES_MAX),
        )
    return Message(
        kind,
        _bounded("the key", found.key, KEY_BYTES_MAX),
        record,
        _neighbours(found.closer),
        _neighbours(found.providers),
    )


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
        address = str(multiaddr.Multiaddr(raw))
        # The parser pads truncated values: accept only bytes that it would write itself.
        if not address or multiaddr.Multiaddr(address).to_bytes() != raw:
            return None
    except (ValueError, LookupError, TypeError, multiaddr.exceptions.Error):
        return None
    if address.endswith(f"/p2p/{peer}"):
        return address
    last_hop = address.rpartition("/p2p/")
    return None if last_hop[1] and "/" not in last_hop[2] else f"{address}/p2p/{peer}"


@functools.lru_cache(maxsize=_PEERS_CACHED)
def _decode_peer(data: bytes) -> Neighbour | None:
    """The peer and its readable addresses; None if it cannot be a Swarm peer (no Ed25519 id)."""
    found = _parsed(_Peer, data)
    try:
        peer = peer_id_from_bytes(_bounded("a peer id", found.id, 128))
    except InvalidPeerId:
        return None
    # Skip addresses that are too long or too many: Go nodes list all their addresses.
    some = [each for each in found.addrs if len(each) <= ADDRESS_BYTES_MAX]
    texts = (_address_from_wire(raw, peer) for raw in some[:ADDRESSES_PER_PEER_MAX])
    return Neighbour(peer, tuple(dict.fromkeys(text for text in texts if text)))


def _neighbours(peers: Sequence[bytes]) -> tuple[Neighbour, ...]:
    found: dict[PeerId, Neighbour] = {}
    for neighbour in map(_decode_peer, peers[:PEERS_PER_MESSAGE_MAX]):
        if neighbour is not None:
            found.setdefault(neighbour.peer, neighbour)
    return tuple(found.values())
