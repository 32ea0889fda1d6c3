"""Signed values: what a node keeps of what strangers send."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.kademlia.records import (
    DATA_BYTES_MAX,
    NAMESPACE,
    InvalidRecord,
    RecordStore,
    SignedValue,
    SignedValues,
    _signed,
    data_of,
    namespace_of,
    sign_value,
    value_key,
)
from swarm.wire.identity import Identity

NOW = 1_800_000_000.0
ALICE, MALLORY = Identity(bytes([1] * 32)), Identity(bytes([2] * 32))
VALIDATOR = SignedValues(lambda: NOW)


def put(data: bytes = b"3e-4", at: float = NOW) -> tuple[bytes, bytes]:
    key, record = sign_value(ALICE, "rate", data, at)
    return key.encode(), record


def test_the_later_value_replaces_the_earlier_one() -> None:
    store = RecordStore({NAMESPACE: VALIDATOR}, 0, lambda: NOW)
    key, late = put(b"late", NOW - 1)
    assert namespace_of(key) == NAMESPACE
    for record in (put(b"early", NOW - 2)[1], late, put(b"early", NOW - 2)[1]):
        held = store.store(key, record, republish_at=0.0)
    assert data_of(held.value) == b"late"


def test_it_expires_after_a_day() -> None:
    key, record = put(at=NOW - 10)
    assert VALIDATOR.validate(key, record).expires_wall_ms == (NOW - 10 + 24 * 3600) * 1000


def test_only_its_own_peer_puts_a_value() -> None:
    key, record = put()
    found = msgspec.msgpack.decode(record, type=SignedValue)
    foreign = SignedValue(
        found.data, found.issued_us, MALLORY.sign(_signed(key, found.data, found.issued_us))
    )
    changed = SignedValue(b"3e+4", found.issued_us, found.signature)
    redated = SignedValue(found.data, found.issued_us - 1, found.signature)
    for bad in (foreign, changed, redated):
        with pytest.raises(InvalidRecord, match="not signed by the peer in its key"):
            VALIDATOR.validate(key, msgspec.msgpack.encode(bad))
    for other in (value_key(ALICE.peer_id, "other"), value_key(MALLORY.peer_id, "rate")):
        with pytest.raises(InvalidRecord, match="not signed by the peer in its key"):
            VALIDATOR.validate(other.encode(), record)


def test_what_is_too_large_or_of_the_future_is_refused() -> None:
    key, _ = put()
    data = bytes(DATA_BYTES_MAX + 1)
    large = SignedValue(data, 0, ALICE.sign(_signed(key, data, 0)))
    with pytest.raises(InvalidRecord, match="a value of 16,385 bytes"):
        VALIDATOR.validate(key, msgspec.msgpack.encode(large))
    with pytest.raises(InvalidRecord, match="signed in the future"):
        VALIDATOR.validate(*put(at=NOW + 61))


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_hostile_bytes_are_refused(key: bytes, record: bytes) -> None:
    signed_key, _ = put()
    for each in (key, b"/swarm-value/" + key, signed_key):
        with pytest.raises(InvalidRecord):
            VALIDATOR.validate(each, record)
