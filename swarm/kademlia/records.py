"""The store of records held for others: validated, versioned, expiring, bounded; signed values.

The key of a value is `/swarm-value/<peer id>/<name>`: only that peer can put it, anybody can read
it, and a later one replaces an earlier one. The peers of a run do not keep such values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from swarm.errors import DECODE_ERRORS, SwarmError, UserError
from swarm.kademlia.routing_table import key_id
from swarm.kademlia.wire import KEY_BYTES_MAX, RECORD_BYTES_MAX
from swarm.wire.identity import Identity, verify

RECORDS_MAX = 4096
"""Records stored for others, per namespace; a swarm of 1,000 peers needs 1,000 · k / 1,000 = k."""

RECORD_STORE_BYTES_MAX = 32 * 1024 * 1024
"""Bytes of records stored for others, per namespace."""

RECORD_SECONDS_MAX = 24 * 3600.0
"""A record that is not stored again is forgotten after this long, whatever expiry it claims."""


class InvalidRecord(SwarmError):
    """A value is refused under its key: unknown namespace, bad signature, expired, too large."""


class StoreFull(SwarmError):
    """The store is full for a namespace, with records that are all nearer to this peer."""


@dataclass(frozen=True)
class RecordInfo:
    version: tuple[int, ...]
    """Of two records under a key, the one with the higher version is better."""
    expires_wall_ms: int
    """Expiry of the record, in milliseconds since the epoch."""


class Validator(Protocol):
    """Checks the records of one namespace. Called on every store, read and republish."""

    def validate(self, key: bytes, value: bytes) -> RecordInfo:
        """Version and expiry of a valid value; raises `InvalidRecord`. Must be cheap and pure."""


@dataclass(frozen=True)
class Held:
    """A validated record. `rank` is a total order, so that all holders agree on the best."""

    key: bytes
    value: bytes
    info: RecordInfo

    @property
    def rank(self) -> tuple[tuple[int, ...], bytes]:
        return self.info.version, self.value


def namespace_of(key: bytes) -> str:
    """`swarm-run` of a key `/swarm-run/…`. Raises `InvalidRecord` for a key of another form."""
    parts = key.split(b"/", 2)
    if len(parts) != 3 or parts[0] or not parts[1] or not parts[2]:
        raise InvalidRecord(f"a record's key is /<namespace>/<name>, not {key[:80]!r}")
    return parts[1].decode("utf-8", "replace")


@dataclass
class _Slot:
    held: Held
    forget_wall_ms: int
    republish_at: float


class RecordStore:
    """Records by key. `wall_time`: seconds since the epoch. `own_id`: the farthest are evicted."""

    def __init__(
        self, validators: Mapping[str, Validator], own_id: int, wall_time: Callable[[], float]
    ) -> None:
        self._validators = dict(validators)
        self._own_id = own_id
        self._wall_time = wall_time
        self._slots: dict[str, dict[bytes, _Slot]] = {name: {} for name in validators}
        self._bytes: dict[str, int] = dict.fromkeys(validators, 0)

    def __len__(self) -> int:
        return sum(len(slots) for slots in self._slots.values())

    def validate(self, key: bytes, value: bytes) -> Held:
        """The validated record; raises `InvalidRecord`."""
        if len(key) > KEY_BYTES_MAX:
            raise InvalidRecord(f"a record's key of {len(key)} bytes is too long")
        if not 0 < len(value) <= RECORD_BYTES_MAX:
            raise InvalidRecord(f"a record of {len(value)} bytes is empty or too large")
        namespace = namespace_of(key)
        validator = self._validators.get(namespace)
        if validator is None:
            raise InvalidRecord(f"no records are kept under /{namespace[:40]}/")
        info = validator.validate(key, value)
        if info.expires_wall_ms <= self._wall_time() * 1000:
            raise InvalidRecord(f"the record {key[:80]!r} has expired")
        return Held(key, value, info)

    def store(self, key: bytes, value: bytes, *, republish_at: float) -> Held:
        """Keep a valid record unless a better one is held, and return the better one;
        `republish_at`: unless stored again before. Raises `InvalidRecord` or `StoreFull`."""
        offered = self.validate(key, value)
        namespace = namespace_of(key)
        slots = self._slots[namespace]
        current = self.get(key)
        if current is not None and current.rank > offered.rank:
            return current
        self._drop(namespace, key)
        while slots and (
            len(slots) >= RECORDS_MAX
            or self._bytes[namespace] + len(value) > RECORD_STORE_BYTES_MAX
        ):
            farthest = max(slots, key=self._distance)
            if self._distance(farthest) < self._distance(key):
                raise StoreFull(f"the store of /{namespace}/ is full of nearer records")
            self._drop(namespace, farthest)
        longest_ms = int((self._wall_time() + RECORD_SECONDS_MAX) * 1000)
        slots[key] = _Slot(offered, min(offered.info.expires_wall_ms, longest_ms), republish_at)
        self._bytes[namespace] += len(value)
        return offered

    def get(self, key: bytes) -> Held | None:
        """The record held under a key, validated again; None if there is none or it is invalid."""
        try:
            namespace = namespace_of(key)
        except InvalidRecord:
            return None
        slot = self._slots.get(namespace, {}).get(key)
        if slot is None:
            return None
        try:
            if slot.forget_wall_ms <= self._wall_time() * 1000:
                raise InvalidRecord(f"the record {key[:80]!r} has expired")
            return self.validate(key, slot.held.value)
        except InvalidRecord:
            self._drop(namespace, key)
            return None

    def held_keys(self) -> list[bytes]:
        """Keys of the records held, some of which may have expired."""
        return [key for slots in self._slots.values() for key in slots]

    def due(self, now: float) -> list[Held]:
        """The records this peer should republish, sorted by key; invalid ones are dropped."""
        keys = sorted(
            key
            for slots in self._slots.values()
            for key, slot in slots.items()
            if slot.republish_at <= now
        )
        return [held for key in keys if (held := self.get(key)) is not None]

    def postpone(self, key: bytes, republish_at: float) -> None:
        slot = self._slots.get(namespace_of(key), {}).get(key)
        if slot is not None:
            slot.republish_at = republish_at

    def expire(self) -> None:
        wall_ms = self._wall_time() * 1000
        for namespace, slots in self._slots.items():
            for key in [key for key, slot in slots.items() if slot.forget_wall_ms <= wall_ms]:
                self._drop(namespace, key)

    def _distance(self, key: bytes) -> int:
        return key_id(key) ^ self._own_id

    def _drop(self, namespace: str, key: bytes) -> None:
        slot = self._slots[namespace].pop(key, None)
        if slot is not None:
            self._bytes[namespace] -= len(slot.held.value)


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
        expires_ms = found.issued_us // 1000 + int(RECORD_SECONDS_MAX * 1000)
        return RecordInfo((found.issued_us,), expires_ms)


def _signed(key: bytes, data: bytes, issued_us: int) -> bytes:
    return b"swarm/1/value" + msgspec.msgpack.encode((key, data, issued_us))
