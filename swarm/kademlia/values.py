"""Values that peers sign, in a namespace of the DHT for networks of one's own nodes.

The key is `/swarm-value/<peer id>/<name>`: only that peer can put the value, anybody can read it,
and a later one replaces an earlier one. The peers of a run do not keep such values.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from swarm.errors import DECODE_ERRORS, UserError
from swarm.kademlia.records import RECORD_SECONDS_MAX, InvalidRecord, RecordInfo
from swarm.wire.identity import Identity, verify

NAMESPACE = "swarm-value"

NAME_BYTES_MAX = 128

DATA_BYTES_MAX = 16 * 1024

FUTURE_SECONDS_MAX = 60.0
"""How far a signer's clock may be ahead."""


class SignedValue(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value as it is stored."""

    data: bytes
    issued_us: int
    """Microseconds since the epoch; also the record's version."""
    signature: bytes


def value_key(peer: str, name: str) -> str:
    """The key of a peer's value; raises `UserError`."""
    if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
        raise UserError(f"the name {name[:40]!r} must have between 1 and {NAME_BYTES_MAX} bytes")
    return f"/{NAMESPACE}/{peer}/{name}"


def sign_value(identity: Identity, name: str, data: bytes, wall_time: float) -> tuple[str, bytes]:
    """The key and the record of a value; raises `UserError`."""
    if len(data) > DATA_BYTES_MAX:
        raise UserError(
            f"the value {name!r} has {len(data):,} bytes, and the DHT takes {DATA_BYTES_MAX:,}; "
            "publish a folder instead"
        )
    key, issued_us = value_key(identity.peer_id, name), int(wall_time * 1e6)
    signature = identity.sign(_signed(key.encode(), data, issued_us))
    return key, msgspec.msgpack.encode(SignedValue(data, issued_us, signature))


def data_of(record: bytes) -> bytes:
    """The value in a validated record."""
    return msgspec.msgpack.decode(record, type=SignedValue).data


class SignedValues:
    """A `swarm.kademlia.records.Validator` of such values. They expire after a day."""

    def __init__(self, wall_time: Callable[[], float]) -> None:
        self._wall_time = wall_time

    def validate(self, key: bytes, value: bytes) -> RecordInfo:
        _, _, peer, name = (*key.split(b"/", 3), b"", b"", b"")[:4]
        if not 0 < len(name) <= NAME_BYTES_MAX:
            raise InvalidRecord("a value's key is /swarm-value/<peer id>/<name>")
        try:
            found = msgspec.msgpack.decode(value, type=SignedValue)
            signer = peer.decode("ascii")
        except DECODE_ERRORS as error:
            raise InvalidRecord(f"no signed value ({error})") from error
        if len(found.data) > DATA_BYTES_MAX:
            raise InvalidRecord(f"a value of {len(found.data):,} bytes")
        if not 0 <= found.issued_us <= (self._wall_time() + FUTURE_SECONDS_MAX) * 1e6:
            raise InvalidRecord("signed in the future")
        if not verify(signer, _signed(key, found.data, found.issued_us), found.signature):
            raise InvalidRecord("not signed by the peer in its key")
        return RecordInfo(found.issued_us, found.issued_us // 1000 + int(RECORD_SECONDS_MAX * 1000))


def _signed(key: bytes, data: bytes, issued_us: int) -> bytes:
    return b"swarm/1/value" + msgspec.msgpack.encode((key, data, issued_us))
