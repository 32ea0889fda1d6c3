"""What only the real network can get wrong: who is believed, relays, ports, addresses, bounds."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.network.config import RetryConfig
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as CircuitPeerId
from libp2p.relay.circuit_v2.protocol_buffer import StatusCode
from libp2p.relay.circuit_v2.resources import RelayLimits
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from multiaddr import Multiaddr

from swarm.errors import UserError
from swarm.transport import ConnectError, ConnectionEvent, Reachability, Stream, limits, room
from swarm.transport.libp2p import Libp2pTransport, open_libp2p, parse_multiaddr, relays
from swarm.transport.libp2p.relays import Reservations
from swarm.wire.identity import Identity
from tests.worlds import VirtualWorld

from .harness import ALICE, BOB, CAROL, MALLORY, FolderDisk
from .test_room import Connection

pytestmark = pytest.mark.wall_clock

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
ECHO = "/swarm/echo/1.0.0"


class Peers:
    """Opens transports that live as long as the test."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack = stack
        self._disk = FolderDisk(folder)

    async def open(self, identity, listen=LOOPBACK, **options) -> Libp2pTransport:
        opened = open_libp2p(identity, listen, world=VirtualWorld(), disk=self._disk, **options)
        return await self._stack.enter_async_context(opened)


async def echo(stream: Stream) -> None:
    while (frame := await stream.receive()) is not None:
        await stream.send(frame)


def plaintext_host(claimed):
    """A host that offers only plaintext and claims to be `claimed`."""
    key_pair = create_new_key_pair(claimed.seed)
    host = new_host(
        key_pair=key_pair,
        sec_opt={PLAINTEXT_PROTOCOL_ID: InsecureTransport(key_pair)},
        listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")],
    )
    host.get_network().retry_config = RetryConfig(max_retries=0)
    return host


async def test_a_plaintext_client_is_refused(tmp_path) -> None:
    async with AsyncExitStack() as stack:
        alice = await Peers(stack, tmp_path).open(ALICE)
        events = alice.connection_events()
        host = plaintext_host(BOB)
        async with host.run([]):
            with pytest.raises(SwarmException):
                await host.get_network().dial_addr(
                    Multiaddr(alice.addresses()[0]), ID.from_string(ALICE.peer_id)
                )
        assert alice.connected() == []
        with pytest.raises(trio.WouldBlock):
            events.receive_nowait()


async def test_a_plaintext_server_is_not_talked_to(tmp_path) -> None:
    """In plaintext anybody can claim Bob's key, so a client must not fall back to it."""
    async with AsyncExitStack() as stack:
        alice = await Peers(stack, tmp_path).open(ALICE)
        host = plaintext_host(BOB)
        async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
            with pytest.raises(ConnectError):
                await alice.connect(BOB.peer_id, [str(a) for a in host.get_addrs()])
        assert alice.connected() == []


async def test_an_impersonator_is_found_out(tmp_path) -> None:
    async with AsyncExitStack() as stack:
        peers = Peers(stack, tmp_path)
        alice, mallory = await peers.open(ALICE), await peers.open(MALLORY)
        address = mallory.addresses()[0].replace(MALLORY.peer_id, BOB.peer_id)
        with pytest.raises(ConnectError, match=BOB.peer_id):
            await alice.connect(BOB.peer_id, [address])
        assert alice.connected() == []


async def test_a_peer_behind_a_relay_is_reached(tmp_path) -> None:
    async with AsyncExitStack() as stack:
        peers = Peers(stack, tmp_path)
        relay = await peers.open(CAROL, relay=True)
        hidden = await peers.open(BOB, [])
        assert hidden.addresses() == ()
        assert hidden.reachability() is Reachability.RELAY_ONLY
        await hidden.use_relay(relay.peer_id, relay.addresses())
        (address,) = hidden.addresses()
        assert address.endswith(f"/p2p/{CAROL.peer_id}/p2p-circuit/p2p/{BOB.peer_id}")
        hidden.serve(ECHO, echo)

        # Alice does not listen either, so that no hole can be punched to her.
        alice = await peers.open(ALICE, [])
        at_hidden, at_alice = hidden.connection_events(), alice.connection_events()
        await alice.connect(BOB.peer_id, [address])
        assert await at_hidden.receive() == ConnectionEvent(ALICE.peer_id, True, relayed=True)
        assert await at_alice.receive() == ConnectionEvent(CAROL.peer_id, True)
        assert await at_alice.receive() == ConnectionEvent(BOB.peer_id, True, relayed=True)
        stream = await alice.open_stream(BOB.peer_id, ECHO)
        for size in (1, 100_000, 1000):
            await stream.send(bytes(size))
            assert await stream.receive() == bytes(size)
        await stream.end()
        assert await stream.receive() is None
        await alice.disconnect(BOB.peer_id)
        assert await at_hidden.receive() == ConnectionEvent(ALICE.peer_id, False)


async def test_a_relayed_connection_becomes_direct_where_it_can(tmp_path) -> None:
    async with AsyncExitStack() as stack:
        peers = Peers(stack, tmp_path)
        relay = await peers.open(CAROL, relay=True)
        hidden = await peers.open(BOB)
        await hidden.use_relay(relay.peer_id, relay.addresses())
        relayed = hidden.addresses()[-1]
        assert "p2p-circuit" in relayed
        alice = await peers.open(ALICE)
        events = alice.connection_events()
        await alice.connect(BOB.peer_id, [relayed])
        seen = [await events.receive() for _ in range(3)]
        assert ConnectionEvent(BOB.peer_id, True, relayed=True) in seen
        assert seen[-1] == ConnectionEvent(BOB.peer_id, True, relayed=False)


async def test_nobody_reserves_in_anothers_name(tmp_path) -> None:
    async with AsyncExitStack() as stack:
        peers = Peers(stack, tmp_path)
        relay = await peers.open(CAROL, relay=True)
        mallory = await peers.open(MALLORY, [])
        await mallory.connect(CAROL.peer_id, relay.addresses())
        for key, status in ((BOB, "PERMISSION_DENIED"), (MALLORY, "OK")):
            name = CircuitPeerId(id=ID.from_string(key.peer_id).to_bytes())
            request = HopMessage(type=HopMessage.RESERVE, peer=name)
            _, reply = await mallory._relays._ask_relay(CAROL.peer_id, request)
            assert reply.status == StatusCode[status]


def test_strangers_cannot_take_all_places_of_a_relay() -> None:
    most, near = 40, relays.RELAY_STRANGERS_PER_RANGE_MAX
    there: dict[ID, Connection] = {}
    limits = RelayLimits(60, 1000, max_circuit_conns=1, max_reservations=most)
    reservations = Reservations(limits, None, there.get)

    def reserve(number: int, host: str, *, vouched: bool = False) -> bool:
        peer = ID.from_string(Identity(number.to_bytes(32, "big")).peer_id)
        there[peer] = Connection(host, vouched=vouched)
        if not reservations.can_accept_reservation(peer):
            return False
        reservations.reserve(peer)
        return True

    assert sum(reserve(n, f"8.8.8.{n}") for n in range(near + 10)) == near
    assert reserve(0, "8.8.8.0"), "who has a place renews it"
    assert all(reserve(100 + n, f"9.{n}.0.1") for n in range(most - near))
    assert not reserve(200, "1.1.1.1"), "all are taken"
    assert reserve(201, "8.8.8.8", vouched=True), "an admitted peer takes a stranger's"
    assert len(reservations._reservations) == most
    gone = next(iter(reservations._reservations))
    del there[gone]
    assert reserve(200, "1.1.1.1"), "who went leaves a place"
    for n in range(most - 1):
        assert reserve(300 + n, "8.8.8.8", vouched=True)
    assert not reserve(400, "8.8.8.8", vouched=True), "among admitted peers the first ones stay"


async def test_a_relay_that_declines_or_is_none_says_so(tmp_path) -> None:
    async with AsyncExitStack() as stack:
        peers = Peers(stack, tmp_path)
        relay = await peers.open(CAROL, relay=True)
        plain = await peers.open(MALLORY)
        alice = await peers.open(ALICE, [])
        through = f"{relay.addresses()[0]}/p2p-circuit/p2p/{BOB.peer_id}"
        with pytest.raises(ConnectError, match="no reservation"):
            await alice.connect(BOB.peer_id, [through])
        with pytest.raises(ConnectError, match=MALLORY.peer_id):
            await alice.use_relay(plain.peer_id, plain.addresses())
        assert alice.addresses() == ()


async def test_more_connections_than_the_limit_come_and_go(tmp_path, monkeypatch) -> None:
    """libp2p by itself never gives an inbound slot back, so a host goes deaf after a while."""
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 3)
    async with AsyncExitStack() as stack:
        peers = Peers(stack, tmp_path)
        alice, bob = await peers.open(ALICE), await peers.open(BOB)
        events = bob.connection_events()
        for _ in range(5):
            await alice.connect(BOB.peer_id, bob.addresses())
            assert (await events.receive()).connected
            await alice.disconnect(BOB.peer_id)
            assert not (await events.receive()).connected


async def test_idle_connections_make_room_for_newcomers(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 1)
    async with AsyncExitStack() as stack:
        peers = Peers(stack, tmp_path)
        bob = await peers.open(BOB)
        alice, carol = await peers.open(ALICE), await peers.open(CAROL)
        events = alice.connection_events()
        await alice.connect(BOB.peer_id, bob.addresses())
        assert (await events.receive()).connected
        await carol.connect(BOB.peer_id, bob.addresses())
        assert not (await events.receive()).connected
        assert bob.connected() == [CAROL.peer_id]


async def test_connections_that_nobody_uses_are_closed_but_no_reservations(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(limits, "CONNECTION_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(limits, "CONNECTION_TRIM_SECONDS", 0.01)
    async with AsyncExitStack() as stack:
        peers = Peers(stack, tmp_path)
        relay = await peers.open(CAROL, relay=True)
        hidden = await peers.open(BOB, [])
        await hidden.use_relay(relay.peer_id, relay.addresses())
        alice = await peers.open(ALICE)
        events, at_relay = alice.connection_events(), relay.connection_events()
        await alice.connect(CAROL.peer_id, relay.addresses())
        monkeypatch.setattr(limits, "CONNECTIONS_KEPT", 0)
        assert (await events.receive()).connected
        assert not (await events.receive()).connected
        while relay.connected() != [BOB.peer_id]:  # which hears of it a moment later
            await at_relay.receive()
        assert hidden.connected() == [CAROL.peer_id]


@pytest.mark.parametrize("ending", ["reset", "end"])
async def test_a_stream_that_has_ended_keeps_no_connection(
    tmp_path, monkeypatch, ending: str
) -> None:
    """Even if this side neither reads it to its end nor resets it."""
    monkeypatch.setattr(limits, "CONNECTION_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(limits, "CONNECTION_TRIM_SECONDS", 0.01)

    async def leave(stream: Stream) -> None:
        await stream.receive()
        if ending == "reset":
            await stream.reset()

    async with AsyncExitStack() as stack:
        peers = Peers(stack, tmp_path)
        alice, bob = await peers.open(ALICE), await peers.open(BOB)
        bob.keep_many()
        bob.serve(ECHO, leave)
        await alice.connect(BOB.peer_id, bob.addresses())
        stream = await alice.open_stream(BOB.peer_id, ECHO)
        monkeypatch.setattr(limits, "CONNECTIONS_KEPT", 0)
        events = alice.connection_events()
        with trio.move_on_after(0.2):
            assert not (await events.receive()).connected
            raise AssertionError("closed although a stream was open")
        await stream.send(b"leave")
        if ending == "end":
            await stream.end()
        assert not (await events.receive()).connected


async def test_one_address_cannot_take_all_connections(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(room, "CONNECTIONS_PER_ADDRESS_MAX", 1)
    async with AsyncExitStack() as stack:
        peers = Peers(stack, tmp_path)
        bob = await peers.open(BOB)
        alice, carol = await peers.open(ALICE), await peers.open(CAROL)
        await alice.connect(BOB.peer_id, bob.addresses())
        with pytest.raises(ConnectError):
            await carol.connect(BOB.peer_id, bob.addresses())
        assert bob.connected() == [ALICE.peer_id]


async def test_silence_ends_a_connection(tmp_path, monkeypatch) -> None:
    """A peer that lost power sends no FIN: only an unanswered ping tells."""
    monkeypatch.setattr(limits, "CONNECTION_PING_SECONDS", 0.2)
    monkeypatch.setattr(limits, "CONNECTION_PONG_SECONDS", 0.3)
    async with AsyncExitStack() as stack:
        peers = Peers(stack, tmp_path)
        alice, bob = await peers.open(ALICE), await peers.open(BOB)
        listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
        port = bob.addresses()[0].split("/")[4]
        gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_silent_proxy, listener, int(port), gate)
            own = listener.socket.getsockname()[1]
            events = alice.connection_events()
            await alice.connect(BOB.peer_id, [f"/ip4/127.0.0.1/tcp/{own}"])
            assert (await events.receive()).connected
            with pytest.raises(trio.TooSlowError), trio.fail_after(0.8):
                await events.receive()  # pings are answered
            gate.set()
            assert not (await events.receive()).connected
            nursery.cancel_scope.cancel()


async def _silent_proxy(listener, port: int, silent: trio.Event) -> None:
    """Forwards bytes both ways until `silent`, then holds both connections open."""
    near = await listener.accept()
    far = await trio.open_tcp_stream("127.0.0.1", port)

    async def pump(source, target) -> None:
        while True:
            data = await source.receive_some()
            if silent.is_set():
                await trio.sleep_forever()
            if not data:
                return
            await target.send_all(data)

    async with listener, near, far, trio.open_nursery() as nursery:
        nursery.start_soon(pump, near, far)
        nursery.start_soon(pump, far, near)


async def test_a_taken_port_is_one_clear_sentence(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is taken"):
            async with open_libp2p(
                ALICE,
                [f"/ip4/127.0.0.1/tcp/{port}"],
                world=VirtualWorld(),
                disk=FolderDisk(tmp_path),
            ):
                pytest.fail("it must not open")
    async with AsyncExitStack() as stack:
        peers = Peers(stack, tmp_path)
        first = await peers.open(ALICE)
        port = first.addresses()[0].split("/")[4]
        with pytest.raises(UserError, match=f"port {port}"):
            await peers.open(BOB, [f"/ip4/127.0.0.1/tcp/{port}"])
        with pytest.raises(UserError, match=f"port {port}"):
            await peers.open(BOB, bulk_port=int(port))
    with pytest.raises(UserError, match=r"192\.0\.2\.1"):  # nobody's address
        async with open_libp2p(
            ALICE, ["/ip4/192.0.2.1/tcp/0"], world=VirtualWorld(), disk=FolderDisk(tmp_path)
        ):
            pytest.fail("it must not open")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rubbish",
        "/ip4/300.1.1.1/tcp/4001",
        "/ip4/127.0.0.1/tcp/99999",
        "/ip4/127.0.0.1/udp/4001",
        "/ip4/127.0.0.1",
        "/tcp/4001",
        "/ip4/127.0.0.1/tcp/4001/p2p/nonsense",
        "/ip4/127.0.0.1/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "/ip4/127.0.0.1/tcp/4001/p2p",
        "http://127.0.0.1:4001",
    ],
)
def test_a_malformed_multiaddr_is_one_clear_sentence(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_multiaddr(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_multiaddrs_that_are_fine() -> None:
    for text in ("/ip4/127.0.0.1/tcp/4001", "/dns4/example.org/tcp/4001", "/ip6/::1/tcp/4001"):
        assert parse_multiaddr(text)[1] is None
        assert parse_multiaddr(f"{text}/p2p/{BOB.peer_id}")[1] == BOB.peer_id
