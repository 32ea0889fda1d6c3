"""The codec against the generated protobuf classes of libp2p, and against hostile bytes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.kad_dht.pb import kademlia_pb2 as oracle
from multiaddr import Multiaddr

from swarm.kademlia import wire
from swarm.kademlia.wire import (
    ADDRESSES_PER_PEER_MAX,
    CAN_CONNECT,
    KEY_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    RECORD_BYTES_MAX,
    Message,
    MessageType,
    Neighbour,
    Record,
    WireError,
)
from swarm.wire.identity import Identity, PeerId, peer_id_bytes

ALICE = Identity(bytes(32)).peer_id
BOB = Identity(bytes([1]) * 32).peer_id


def at(peer: PeerId, *ports: int) -> Neighbour:
    return Neighbour(peer, tuple(f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}" for port in ports))


peers = st.builds(
    lambda number, ports: at(Identity(bytes([number]) * 32).peer_id, *ports),
    st.integers(0, 255),
    st.lists(st.integers(0, 65535), max_size=4, unique=True),
)
some_peers = st.lists(peers, max_size=5, unique_by=lambda each: each.peer).map(tuple)
messages = st.builds(
    Message,
    st.sampled_from(MessageType),
    st.binary(max_size=KEY_BYTES_MAX),
    st.none() | st.builds(Record, st.binary(max_size=256), st.binary(max_size=2000)),
    some_peers,
    some_peers,
)


def to_oracle(message: Message) -> oracle.Message:
    result = oracle.Message(type=int(message.type), key=message.key)  # type: ignore[arg-type]
    if message.record is not None:
        result.record.SetInParent()
        result.record.key = message.record.key
        result.record.value = message.record.value
    for target, source in (
        (result.closerPeers, message.closer_peers),
        (result.providerPeers, message.provider_peers),
    ):
        for peer in source:
            own = f"/p2p/{peer.peer}"
            target.add(
                id=peer_id_bytes(peer.peer),
                addrs=[Multiaddr(each.removesuffix(own)).to_bytes() for each in peer.addresses],
                connection=CAN_CONNECT,  # type: ignore[arg-type]
            )
    return result


@given(messages)
def test_same_bytes_as_the_generated_classes_both_ways(message):
    encoded = wire.encode(message)
    reference = to_oracle(message).SerializeToString()
    assert encoded == (reference or b"\x08\x00")
    assert wire.decode(reference) == message


def test_golden_vectors():
    """What docs/protocol/kademlia.md prints."""
    vectors = {
        "08051a00": Message(MessageType.PING, record=Record()),
        "0804120161": Message(MessageType.FIND_NODE, b"a"),
        "12022f611a070a022f61120162": Message(MessageType.PUT_VALUE, b"/a", Record(b"/a", b"b")),
        "0802120161" + "4a34" + f"0a26{peer_id_bytes(ALICE).hex()}" + "1208047f000001060fa11802": (
            Message(MessageType.ADD_PROVIDER, b"a", provider_peers=(at(ALICE, 4001),))
        ),
    }
    for text, message in vectors.items():
        assert wire.encode(message).hex() == text
        assert wire.decode(bytes.fromhex(text)) == message
        assert to_oracle(message).SerializeToString().hex() == text


def test_unknown_fields_are_skipped():
    reference = oracle.Message(type=4, key=b"a", clusterLevelRaw=7, senderRecord=b"x" * 100)  # type: ignore[arg-type]
    peer = reference.closerPeers.add(id=peer_id_bytes(BOB), signedRecord=b"y")
    peer.connection = 1  # type: ignore[assignment]
    reference.record.timeReceived = "2026-11-20T12:00:00.000000000Z"
    fixed_width = b"\x69" + bytes(8) + b"\x6d" + bytes(4)  # fields 13, 64 and 32 bits wide
    assert wire.decode(reference.SerializeToString() + fixed_width) == Message(
        MessageType.FIND_NODE, b"a", Record(), (Neighbour(BOB),)
    )


@pytest.mark.parametrize(
    "message",
    [
        oracle.Message(key=bytes(KEY_BYTES_MAX + 1)),
        oracle.Message(record=oracle.Record(value=bytes(RECORD_BYTES_MAX + 1))),
        oracle.Message(record=oracle.Record(key=bytes(KEY_BYTES_MAX + 1))),
        oracle.Message(senderRecord=bytes(MESSAGE_BYTES_MAX)),
        oracle.Message(closerPeers=[oracle.Message.Peer(id=bytes(129))]),
    ],
)
def test_what_exceeds_a_bound_is_refused(message):
    with pytest.raises(WireError):
        wire.decode(message.SerializeToString())


@pytest.mark.parametrize(
    "data", ["0806", "12", "1202", "80", "0b", "00", "08" + "ff" * 10, "1aff01"]
)
def test_malformed_messages_are_refused(data):
    with pytest.raises(WireError):
        wire.decode(bytes.fromhex(data))


def test_surplus_peers_and_addresses_are_left_out():
    many = oracle.Message(type=4)  # type: ignore[arg-type]
    addresses = [Multiaddr(f"/ip4/9.9.9.9/tcp/{port}").to_bytes() for port in range(40)]
    for number in range(30):
        identifier = peer_id_bytes(Identity(bytes([number]) * 32).peer_id)
        many.closerPeers.add(id=identifier, addrs=[bytes(500), *addresses])
    decoded = wire.decode(many.SerializeToString())
    assert len(decoded.closer_peers) == 20
    assert {len(peer.addresses) for peer in decoded.closer_peers} == {ADDRESSES_PER_PEER_MAX}


def test_the_largest_honest_answer_fits():
    name = ".".join(["a" * 59] * 3)
    crowd = tuple(
        Neighbour(peer, tuple(f"/dns4/{name}.{n}/tcp/1/p2p/{peer}" for n in range(10, 26)))
        for peer in (Identity(bytes([n]) * 32).peer_id for n in range(20))
    )
    key = bytes(KEY_BYTES_MAX)
    record = Record(key, bytes(RECORD_BYTES_MAX))
    for message in (
        Message(MessageType.GET_VALUE, key, record, crowd),
        Message(MessageType.GET_PROVIDERS, key, None, crowd, crowd),
    ):
        assert wire.decode(wire.encode(message)) == message
    with pytest.raises(WireError):
        wire.encode(Message(MessageType.GET_VALUE, key, record, crowd, crowd))


def parsed(*peers: tuple[bytes, list[bytes]]) -> tuple[Neighbour, ...]:
    """What is read of peers with these ids and addresses."""
    message = oracle.Message(type=4)  # type: ignore[arg-type]
    for identifier, addresses in peers:
        message.closerPeers.add(id=identifier, addrs=addresses)
    return wire.decode(message.SerializeToString()).closer_peers


def test_peers_travel_without_their_id_in_the_address():
    relayed = f"/ip4/9.9.9.9/tcp/1/p2p/{BOB}/p2p-circuit/p2p/{ALICE}"
    addresses = (f"/ip4/127.0.0.1/tcp/4001/p2p/{ALICE}", relayed)
    peer = Neighbour(ALICE, (*addresses, "no address"))
    encoded = wire.encode(Message(MessageType.FIND_NODE, closer_peers=(peer, peer)))
    (first, _) = oracle.Message.FromString(encoded).closerPeers
    assert first.addrs[0].hex() == "047f000001060fa1"
    assert wire.decode(encoded).closer_peers == (Neighbour(ALICE, addresses),)


def test_addresses_of_other_peers_and_foreign_ids_are_left_out():
    bob = peer_id_bytes(BOB)
    alices = Multiaddr(f"/ip4/9.9.9.9/tcp/1/p2p/{ALICE}").to_bytes()
    assert parsed((bob, [alices]), (b"Qm", []), (b"", [])) == (Neighbour(BOB),)
    assert parsed((bob, [b"", b"\x04\x01", b"\xff" * 20, b"\x06\x00"])) == (Neighbour(BOB),)


def test_importing_the_room_does_not_import_libp2p():
    code = "import sys, swarm.kademlia; sys.exit('libp2p' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
