"""A relay's limits: what it carries, what it says when one is reached, and to whom."""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Reservation
from libp2p.relay.circuit_v2.protocol_buffer import StatusCode
from libp2p.utils.varint import encode_varint_prefixed

from swarm.events import Event, Events
from swarm.transport import ConnectError, StreamError
from swarm.transport.libp2p.circuits import STRANGERS_SHARE, CircuitLimits, Circuits
from swarm.transport.libp2p.relays import LIFETIME_SECONDS, Relays
from swarm.transport.limits import RELAY_RETRY_SECONDS
from swarm.wire.identity import Identity, PeerId
from tests.network.harness import identity
from tests.transport.harness import ALICE, BOB, CAROL
from tests.transport.test_libp2p_security import ECHO, Peers, echo, plaintext_host
from tests.transport.test_room import Connection
from tests.worlds import VirtualWorld

pytestmark = pytest.mark.wall_clock


class Relayed:
    """Bob behind Carol's relay, and the events of all three."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.events: dict[str, list[Event]] = {}

    async def open(self, key: Identity, listen: Any = (), **options: Any) -> Any:
        events = Events(VirtualWorld(), key.peer_id)
        events.add_sink(self.events.setdefault(key.peer_id, []).append)
        peer = await self._peers.open(key, listen, events=events, **options)
        peer.serve(ECHO, echo)
        return peer

    async def start(self, limits: CircuitLimits) -> tuple[Any, str]:
        """Bob and his address."""
        self.relay = await self.open(
            CAROL, ["/ip4/127.0.0.1/tcp/0"], relay=True, circuit_limits=limits
        )
        bob = await self.open(BOB)
        await bob.use_relay(CAROL.peer_id, self.relay.addresses())
        return bob, bob.addresses()[-1]

    async def heard(self, key: Identity, name: str) -> Event:
        """The first event of a name, once it has come."""
        with trio.fail_after(8):
            while True:
                for event in self.events[key.peer_id]:
                    if event.name == name:
                        return event
                await trio.sleep(0.02)


async def test_a_circuit_ends_after_its_bytes_and_another_can_be_opened(tmp_path) -> None:
    async with AsyncExitStack() as stack:
        net = Relayed(Peers(stack, tmp_path))
        _, address = await net.start(CircuitLimits(circuit_bytes=300_000))
        alice = await net.open(ALICE)
        await alice.connect(BOB.peer_id, [address])
        stream = await alice.open_stream(BOB.peer_id, ECHO)
        with pytest.raises(StreamError):
            for _ in range(10):
                await stream.send(bytes(100_000))
                assert await stream.receive() == bytes(100_000)
        assert (await net.heard(CAROL, "relay.limit_reached")).fields["limit"] == "bytes"
        await alice.connect(BOB.peer_id, [address])  # a new circuit has a new allowance


async def test_a_circuit_ends_after_its_time(tmp_path) -> None:
    async with AsyncExitStack() as stack:
        net = Relayed(Peers(stack, tmp_path))
        _, address = await net.start(CircuitLimits(circuit_seconds=1))
        alice = await net.open(ALICE)
        await alice.connect(BOB.peer_id, [address])
        assert (await net.heard(CAROL, "relay.limit_reached")).fields["limit"] == "time"


async def test_one_circuit_ends_without_the_others_and_frees_its_place(tmp_path) -> None:
    async with AsyncExitStack() as stack:
        net = Relayed(Peers(stack, tmp_path))
        _, address = await net.start(CircuitLimits(circuits_per_peer=2))
        first, second, third = [await net.open(identity(n)) for n in (21, 22, 23)]
        await first.connect(BOB.peer_id, [address])
        await second.connect(BOB.peer_id, [address])
        with pytest.raises(ConnectError, match="resource limit exceeded"):
            await third.connect(BOB.peer_id, [address])
        assert (await net.heard(CAROL, "relay.limit_reached")).fields["limit"] == (
            "circuits per peer"
        )
        stream = await second.open_stream(BOB.peer_id, ECHO)
        await first.disconnect(BOB.peer_id)
        with trio.fail_after(5):
            while BOB.peer_id not in third.connected():
                try:
                    await third.connect(BOB.peer_id, [address])
                except ConnectError:
                    await trio.sleep(0.05)
        await stream.send(b"still here")
        assert await stream.receive() == b"still here"


class Carried:
    """One end of a circuit as libp2p's streams have it, in memory."""

    def __init__(self, stream: Any) -> None:
        self.read, self.write = stream.receive_some, stream.send_all


def test_all_circuits_together_keep_to_the_rate() -> None:
    async def main() -> None:
        limits = CircuitLimits(bytes_per_second=400_000)
        relay = Circuits(plaintext_host(CAROL), limits, None, allow_hop=True)

        async def send(size_bytes: int) -> None:
            alice, near = trio.testing.memory_stream_pair()
            bob, far = trio.testing.memory_stream_pair()
            nursery.start_soon(relay.carry, Carried(near), Carried(far))
            await alice.send_all(bytes(size_bytes))
            while size_bytes:
                size_bytes -= len(await bob.receive_some())

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as sending:
                for _ in range(2):
                    sending.start_soon(send, 300_000)
            nursery.cancel_scope.cancel()
        # 600 kB, of which 200 kB at once.
        assert trio.current_time() - began == pytest.approx(1.0)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


class LyingRelay:
    """Libp2p's host and this peer's transport, with a relay that grants each reservation until a
    time of its choice. It keeps the connection, or hangs up at once."""

    def __init__(self, expires: int, *, hangs_up: bool) -> None:
        self._expires = expires
        self._hangs_up = hangs_up
        self.asked_at: list[float] = []

    async def connect(self, peer: PeerId, addresses: Any) -> None:
        await trio.lowlevel.checkpoint()

    def connected(self) -> list[PeerId]:
        return [] if self._hangs_up else [CAROL.peer_id]

    def connection_events(self) -> Any:
        self._send, receive = trio.open_memory_channel[Any](1)
        return receive

    async def new_stream(self, peer: Any, protocols: Any) -> Any:
        await trio.lowlevel.checkpoint()
        if len(self.asked_at) > 1000:
            raise OSError("this peer asks all the time")
        self.asked_at.append(trio.current_time())
        near, far = trio.testing.memory_stream_pair()
        reply = HopMessage(
            type=HopMessage.STATUS,
            status=StatusCode.OK.value,
            reservation=Reservation(expire=self._expires),
        )
        await far.send_all(encode_varint_prefixed(reply.SerializeToString()))
        return Granting(near)


class Granting(Carried):
    async def reset(self) -> None:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("expires", [0, 1, 2**63])
@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_relay_that_lies_about_time_is_asked_seldom_and_not_forgotten(
    expires: int, hangs_up: bool
) -> None:
    async def main() -> None:
        there: Any = LyingRelay(expires, hangs_up=hangs_up)
        kept = Relays(there, there)
        with trio.move_on_after(7200):
            await kept.keep_reservation(CAROL.peer_id, ["address"])
        pauses = [later - before for before, later in itertools.pairwise(there.asked_at)]
        if hangs_up:
            assert set(pauses) == {RELAY_RETRY_SECONDS} and not kept.addresses()
        else:
            shortest, longest = (each / 2 for each in LIFETIME_SECONDS)
            assert pauses and all(shortest <= pause <= longest for pause in pauses)
            assert kept.addresses() == ["address"]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_an_admitted_peer_takes_the_circuit_of_a_stranger(tmp_path) -> None:
    async with AsyncExitStack() as stack:
        net = Relayed(Peers(stack, tmp_path))
        _, address = await net.start(CircuitLimits(circuits_per_peer=2))
        first, second, third, fourth, fifth = [await net.open(identity(n)) for n in range(21, 26)]
        await first.connect(BOB.peer_id, [address])
        await second.connect(BOB.peer_id, [address])
        with first.connection_events() as lost:
            net.relay.vouch(third.peer_id, 60)
            await third.connect(BOB.peer_id, [address])
            while BOB.peer_id in first.connected():
                await lost.receive()
        with pytest.raises(ConnectError, match="resource limit exceeded"):
            await first.connect(BOB.peer_id, [address])
        assert BOB.peer_id in second.connected()
        for admitted in (fourth, fifth):
            net.relay.vouch(admitted.peer_id, 60)
        await fourth.connect(BOB.peer_id, [address])
        with pytest.raises(ConnectError, match="resource limit exceeded"):
            await fifth.connect(BOB.peer_id, [address])


def test_strangers_of_one_network_take_a_share_of_a_peers_circuits() -> None:
    there: dict[ID, Connection] = {}
    relay = Circuits(
        plaintext_host(CAROL), CircuitLimits(circuits_per_peer=8), None, allow_hop=True
    )
    relay._connection_of = there.get
    bob = ID.from_string(BOB.peer_id)
    relay.resource_manager.host = None  # which would look for Bob's connection
    relay.resource_manager.reserve(bob)

    def opens(number: int, host: str) -> bool:
        peer = ID.from_string(identity(number).peer_id)
        there[peer] = Connection(host)
        if relay._refusal(peer, bob) is not None:
            return False
        opened.enter_context(relay._opened(peer, bob))
        return True

    with ExitStack() as opened:
        share = 8 // STRANGERS_SHARE
        assert sum(opens(n, f"8.8.8.{n}") for n in range(1, 30)) == share
        assert sum(opens(n, f"8.9.{n}.8") for n in range(31, 60)) == 8 - share
    assert opens(1, "8.8.8.1"), "an ended one leaves its place"
