"""What the simulated network adds to the transport's contract: time, loss, cuts, power."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio

from simnet.clock import SimulatedWorld, run_virtual
from simnet.disk import SimulatedDisk
from simnet.extents import Symbol
from simnet.lines import Line, Weather
from simnet.links import SILENCE_SECONDS
from simnet.network import SimulatedNetwork
from simnet.transport import CONNECT_SECONDS
from swarm.transport import (
    BlobReference,
    ConnectError,
    ConnectionEvent,
    FetchError,
    OpenBlob,
    Reachability,
    Refused,
    Source,
    Stream,
    StreamError,
    limits,
)
from swarm.transport.http import limits as http_limits
from swarm.wire.identity import Identity

RUNNER = partial(run_virtual, seed=1, limit_seconds=1e5)
ECHO = "/swarm/echo/1.0.0"
ALICE, BOB, CAROL = (Identity(bytes([n]) * 32) for n in range(1, 4))
CALM = Weather(jitter=0.0, loss=0.0, local_seconds=0.01)


class Blobs:
    """Serves the first bytes of one file to everybody."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.sizes: dict[bytes, int] = {}

    def admits(self, peer: Any, credential: bytes) -> bool:
        return True

    def open(self, client: Any, digest: bytes) -> OpenBlob:
        if digest not in self.sizes:
            raise Refused(404, "unknown blob")
        return OpenBlob(self.path, 0, self.sizes[digest])

    def accept(self, client: Any, reference: Any) -> Any:
        raise Refused(403, "takes nothing")


class Peer:
    def __init__(self, transport: Any, disk: SimulatedDisk) -> None:
        self.transport = transport
        self.disk = disk
        self.id = transport.peer_id

    def source(self) -> Source:
        return Source(self.id, tuple(self.transport.bulk_addresses()))


@asynccontextmanager
async def peers(
    seed: int = 1, weather: Weather = CALM, **lines: Line
) -> AsyncIterator[tuple[SimulatedNetwork, Peer, Peer, Peer]]:
    """The network, alice, bob and carol, a relay, with the lines given by name."""
    network = SimulatedNetwork(seed, weather)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(network.running())
        found = []
        for name, key in (("alice", ALICE), ("bob", BOB), ("carol", CAROL)):
            disk = SimulatedDisk(name)
            opened = network.transport(
                key,
                world=SimulatedWorld(seed, name),
                disk=disk,
                line=lines.get(name),
                relay=name == "carol",
            )
            found.append(Peer(await stack.enter_async_context(opened), disk))
        alice, bob, carol = found
        yield network, alice, bob, carol


async def echo(stream: Stream) -> None:
    while (frame := await stream.receive()) is not None:
        await stream.send(frame)


async def connect(a: Peer, b: Peer) -> None:
    await a.transport.connect(b.id, b.transport.addresses())


async def round_trip(stream: Stream, data: bytes = b"x") -> float:
    started = trio.current_time()
    await stream.send(data)
    assert await stream.receive() == data
    return trio.current_time() - started


async def test_distance_and_narrow_lines_take_time() -> None:
    async with peers(carol=Line("asia-east", uplink_bytes_per_second=1e6)) as (
        network,
        alice,
        bob,
        carol,
    ):
        for peer in (bob, carol):
            peer.transport.serve(ECHO, echo)
        await connect(alice, bob)
        assert trio.current_time() == pytest.approx(CONNECT_SECONDS + 5 * 0.02)
        near = await alice.transport.open_stream(bob.id, ECHO)
        assert await round_trip(near) == pytest.approx(0.02, abs=1e-4)
        await connect(alice, carol)
        far = await alice.transport.open_stream(carol.id, ECHO)
        one_way = network.latency("europe-west", "asia-east")
        assert 0.02 <= one_way <= 0.15
        assert await round_trip(far) == pytest.approx(2 * one_way, abs=1e-4)
        # 100 kB over carol's uplink of 1 MB/s on the way back.
        assert await round_trip(far, bytes(100_000)) == pytest.approx(2 * one_way + 0.1, abs=2e-3)


@pytest.mark.parametrize("loss", [0.0, 0.3])
async def test_messages_stay_in_order_however_many_packets_are_lost(loss: float) -> None:
    got: list[bytes] = []

    async def note(stream: Stream) -> None:
        while (frame := await stream.receive()) is not None:
            got.append(frame)

    async with peers(weather=replace(CALM, loss=loss)) as (_, alice, bob, _carol):
        bob.transport.serve(ECHO, note)
        await connect(alice, bob)
        started = trio.current_time()
        stream = await alice.transport.open_stream(bob.id, ECHO)
        for number in range(200):
            await stream.send(number.to_bytes(2, "big"))
        await stream.end()
        assert await stream.receive() is None
        assert got == [number.to_bytes(2, "big") for number in range(200)]
        assert (trio.current_time() - started < 0.1) is not bool(loss)


def test_what_one_link_draws_does_not_change_another() -> None:
    async def times(also_carol: bool) -> list[float]:
        async with peers(weather=Weather(loss=0.1)) as (_, alice, bob, carol):
            for peer in (bob, carol):
                peer.transport.serve(ECHO, echo)
            await connect(alice, bob)
            stream = await alice.transport.open_stream(bob.id, ECHO)
            if also_carol:
                await connect(carol, bob)
                other = await carol.transport.open_stream(bob.id, ECHO)
                for _ in range(20):
                    await round_trip(other)
            return [round(await round_trip(stream), 9) for _ in range(20)]

    beside, alone = (RUNNER(partial(times, each)) for each in (True, False))
    assert beside == alone


async def test_a_cut_link_is_missed_when_a_ping_goes_unanswered() -> None:
    async with peers() as (network, alice, bob, _carol):
        bob.transport.serve(ECHO, echo)
        await connect(alice, bob)
        stream = await alice.transport.open_stream(bob.id, ECHO)
        events = alice.transport.connection_events()
        cut_at = trio.current_time()
        network.cut(alice.id, bob.id)
        await stream.send(b"lost")
        with pytest.raises(StreamError, match="the connection was lost"):
            await stream.receive()
        assert trio.current_time() == pytest.approx(cut_at + SILENCE_SECONDS)
        assert await events.receive() == ConnectionEvent(bob.id, connected=False)
        assert bob.transport.connected() == []
        with pytest.raises(ConnectError, match="no answer within"):
            await connect(alice, bob)
        network.heal(alice.id, bob.id)
        await connect(alice, bob)


async def test_a_connection_whose_packets_are_all_lost_ends_and_a_new_one_is_well() -> None:
    """Else what comes later would wait, in order, for attempts that are minutes apart."""

    async with peers() as (network, alice, bob, _carol):
        bob.transport.serve(ECHO, echo)
        await connect(alice, bob)
        stream = await alice.transport.open_stream(bob.id, ECHO)
        began = trio.current_time()
        network.lose(bob.id, 0.9)
        for _ in range(50):
            await stream.send(b"lost")
        network.lose(bob.id, -0.9)
        with pytest.raises(StreamError, match="the connection was lost"):
            while True:
                await stream.receive()
        assert trio.current_time() == pytest.approx(began + SILENCE_SECONDS)
        assert alice.transport.connected() == bob.transport.connected() == []
        await connect(alice, bob)
        assert await round_trip(await alice.transport.open_stream(bob.id, ECHO)) < 1.0


@pytest.mark.parametrize("one_way", [False, True])
async def test_a_short_cut_only_delays(one_way: bool) -> None:
    async with peers() as (network, alice, bob, _carol):
        bob.transport.serve(ECHO, echo)
        await connect(alice, bob)
        stream = await alice.transport.open_stream(bob.id, ECHO)
        network.cut(bob.id, alice.id, one_way=one_way)
        await stream.send(b"late")
        with trio.move_on_after(5) as waited:
            await stream.receive()
        assert waited.cancelled_caught
        network.heal(bob.id, alice.id, one_way=one_way)
        assert await stream.receive() == b"late"
        await trio.sleep(2 * SILENCE_SECONDS)
        assert bob.id in alice.transport.connected()


async def test_a_dead_process_is_missed_at_once_and_a_dead_machine_later() -> None:
    async with peers() as (network, alice, bob, carol):
        await connect(alice, bob)
        await connect(alice, carol)
        events = alice.transport.connection_events()
        network.kill(bob.id)
        network.cut_power(carol.id)
        started = trio.current_time()
        assert (await events.receive()).peer == bob.id
        assert trio.current_time() == pytest.approx(started + 0.01, abs=1e-3)
        assert (await events.receive()).peer == carol.id
        assert trio.current_time() == pytest.approx(started + SILENCE_SECONDS)
        assert carol.transport.connected() == []
        with pytest.raises(ConnectError, match="no peer answers"):
            await connect(alice, bob)
        with pytest.raises(ConnectError, match="no answer"):
            await connect(alice, carol)
        # Back at the same address.
        async with network.transport(
            CAROL, world=SimulatedWorld(1, "again"), disk=carol.disk
        ) as again:
            assert again.addresses() == carol.transport.addresses()
            await connect(alice, carol)
            assert again.connected() == [alice.id]


IDLE_SECONDS = limits.CONNECTION_GRACE_SECONDS + 2 * limits.CONNECTION_TRIM_SECONDS


async def test_a_connection_with_a_reservation_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_KEPT", 0)

    async with peers(bob=Line(reachability="symmetric")) as (_, _alice, bob, carol):
        await bob.transport.use_relay(carol.id, carol.transport.addresses())
        await trio.sleep(IDLE_SECONDS)
        assert carol.transport.connected() == [bob.id]


async def test_two_who_dial_each_other_at_once_have_one_connection() -> None:
    async with peers() as (_network, alice, bob, _carol):
        bob.transport.serve(ECHO, echo)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connect, alice, bob)
            nursery.start_soon(connect, bob, alice)
        stream = await alice.transport.open_stream(bob.id, ECHO)
        await round_trip(stream)


# --- the bulk plane ---

SIZE = 10**9


async def serve(peer: Peer, size_bytes: int = SIZE) -> BlobReference:
    """Serve content in name only."""
    peer.disk.put("model", 0, Symbol("policy", 0, size_bytes))
    blobs = Blobs("model")
    digest = await peer.disk.digest("model", 0, size_bytes)
    blobs.sizes[digest] = size_bytes
    peer.transport.serve_bulk(blobs)
    return BlobReference(digest, size_bytes)


async def fetch(peer: Peer, source: Source, reference: BlobReference) -> float:
    started = trio.current_time()
    sink = peer.disk.sink("model", 0, reference.size_bytes)
    piece = await peer.transport.fetch(source, reference, sink)
    assert piece.verify(reference.digest)
    await sink.commit(piece)
    return trio.current_time() - started


async def test_two_who_fetch_share_the_uplink_of_the_source() -> None:
    async with peers(
        alice=Line(uplink_bytes_per_second=100e6),
        bob=Line(downlink_bytes_per_second=20e6),
        carol=Line(downlink_bytes_per_second=1e9),
    ) as (_network, alice, bob, carol):
        reference = await serve(alice)
        times: list[float] = []

        async def note(peer: Peer) -> None:
            times.append(await fetch(peer, alice.source(), reference))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(note, bob)
            nursery.start_soon(note, carol)
        # 100 MB/s: bob's line takes 20 of it, so carol gets 80; then bob is alone, and slow.
        assert times == pytest.approx([SIZE / 80e6, SIZE / 20e6], rel=0.01)
        assert alice.transport.traffic.sent == 2 * SIZE


async def test_a_transfer_survives_a_short_cut_and_not_a_long_one() -> None:
    async with peers() as (network, alice, bob, _carol):
        reference = await serve(alice)
        for seconds in (6, 20):
            async with trio.open_nursery() as nursery:

                async def interrupt(seconds: int = seconds) -> None:
                    await trio.sleep(3)
                    network.cut(alice.id, bob.id)
                    await trio.sleep(seconds)
                    network.heal(alice.id, bob.id)

                nursery.start_soon(interrupt)
                if seconds < http_limits.STALL_SECONDS:
                    took = await fetch(bob, alice.source(), reference)
                    assert took == pytest.approx(SIZE / 125e6 + seconds, rel=0.02)
                else:
                    with pytest.raises(FetchError, match="has sent nothing for 10 s"):
                        await fetch(bob, alice.source(), reference)


@pytest.mark.parametrize("power", [False, True])
async def test_a_source_that_dies_breaks_off_its_transfers(power: bool) -> None:
    async with peers() as (network, alice, bob, _carol):
        reference = await serve(alice)
        started = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def die() -> None:
                await trio.sleep(3)
                (network.cut_power if power else network.kill)(alice.id)

            nursery.start_soon(die)
            with pytest.raises(FetchError, match="sent nothing" if power else "broke off"):
                await fetch(bob, alice.source(), reference)
            took = trio.current_time() - started
            assert took == pytest.approx(13 if power else 3, abs=0.1)
        with pytest.raises(FetchError):
            await fetch(bob, alice.source(), reference)


# --- behind NATs ---


@pytest.mark.parametrize(
    ("here", "there", "direct"),
    [
        ("public", "cone", True),
        ("cone", "cone", True),
        ("symmetric", "cone", True),
        ("public", "symmetric", True),
        ("symmetric", "symmetric", False),
        ("public", "relay-only", False),
        ("cone", "relay-only", False),
    ],
)
async def test_a_peer_behind_a_nat_is_reached_over_a_relay(
    here: str, there: str, direct: bool
) -> None:
    async def heard(events: Any, count: int) -> list[Any]:
        with trio.fail_after(10):
            return [await anext(events) for _ in range(count)]

    one, other = Line(reachability=here), Line(reachability=there)
    async with peers(alice=one, bob=other) as (network, alice, bob, carol):
        bob.transport.serve(ECHO, echo)
        own = bob.transport.addresses()
        assert bob.transport.reachability() is Reachability.UNKNOWN
        with pytest.raises(ConnectError, match="no answer within"):
            await alice.transport.connect(bob.id, own)
        await bob.transport.use_relay(carol.transport.peer_id, carol.transport.addresses())
        assert bob.transport.reachability() is Reachability.RELAY_ONLY
        relayed = [address for address in bob.transport.addresses() if "p2p-circuit" in address]
        assert relayed == [f"{carol.transport.addresses()[0]}/p2p-circuit/p2p/{bob.id}"]

        events = alice.transport.connection_events()
        await alice.transport.connect(bob.id, relayed)
        assert [event.relayed for event in await heard(events, 2)] == [False, True]  # carol, bob
        stream = await alice.transport.open_stream(bob.id, ECHO)
        await trio.sleep(5.0)
        assert [event.relayed for event in await heard(events, int(direct))] == [False] * direct
        over_relay = await round_trip(stream)
        assert (over_relay < 0.03) is direct, "a relay doubles the way"

        network.kill(carol.id)
        await trio.sleep(1.0)
        assert (bob.id in alice.transport.connected()) is direct


async def test_a_relay_carries_only_for_those_who_reserved() -> None:
    async with peers(bob=Line(reachability="cone")) as (_network, alice, bob, carol):
        circuit = f"{carol.transport.addresses()[0]}/p2p-circuit/p2p/{bob.id}"
        with pytest.raises(ConnectError, match="has no reservation there"):
            await alice.transport.connect(bob.id, [circuit])
        with pytest.raises(ConnectError, match="it carries no connections"):
            await bob.transport.use_relay(alice.transport.peer_id, alice.transport.addresses())
