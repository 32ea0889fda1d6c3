"""What every transport promises, asked of the simulated one and of libp2p alike."""

from __future__ import annotations

import contextlib
import random
from contextlib import AsyncExitStack
from typing import cast

import pytest
import trio
import trio.testing

from swarm.errors import PeerError
from swarm.transport import (
    BlobReference,
    ConnectError,
    ConnectionEvent,
    FetchError,
    Source,
    Stream,
    StreamError,
    base,
    limits,
)
from swarm.transport.framing import ByteStream, FramedStream, encode_frame
from swarm.transport.http import limits as http_limits
from swarm.wire.identity import Identity

from .harness import ALICE, BOB, CAROL, Network, Peer, Service, Sink

ECHO = "/swarm/echo/1.0.0"


@pytest.fixture(params=["simulated", "libp2p"])
def network(request: pytest.FixtureRequest, tmp_path, monkeypatch) -> Network:
    if request.param == "libp2p":  # real seconds
        monkeypatch.setattr(limits, "STREAM_SEND_DEADLINE_SECONDS", 0.5)
        monkeypatch.setattr(http_limits, "STALL_SECONDS", 0.5)
    return Network(request.param, tmp_path)


async def echo(stream: Stream) -> None:
    while (frame := await stream.receive()) is not None:
        await stream.send(frame)


# --- streams ---------------------------------------------------------------------------------


async def test_frames_go_both_ways_in_order_until_end(network: Network) -> None:
    async with network.pair() as (alice, bob):
        bob.transport.serve(ECHO, echo)
        bob.transport.vouch(alice.id, 60)  # a stranger would send 5 MB at its rate
        stream = await alice.transport.open_stream(bob.id, ECHO)
        assert stream.peer == bob.id
        assert stream.protocol == ECHO
        frames = [random.Random(n).randbytes(1 + n * 997) for n in range(100)]

        async def send() -> None:
            for frame in frames:
                await stream.send(frame)
            await stream.end()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            for frame in frames:
                assert await stream.receive() == frame
            assert await stream.receive() is None
        assert await stream.receive() is None
        await stream.reset()
        with pytest.raises(ValueError, match="END already"):
            await stream.send(b"more")


async def test_the_server_knows_who_calls(network: Network) -> None:
    async with network.pair() as (alice, bob):
        callers = []

        async def note(stream: Stream) -> None:
            callers.append(stream.peer)

        bob.transport.serve(ECHO, note)
        stream = await alice.transport.open_stream(bob.id, ECHO)
        assert await stream.receive() is None
        assert callers == [alice.id]


async def test_a_handler_that_fails_resets_its_stream_and_nothing_else(network: Network) -> None:
    async with network.pair() as (alice, bob):

        async def fail(stream: Stream) -> None:
            await stream.receive()
            raise PeerError("no more of this")

        bob.transport.serve("/swarm/fail/1.0.0", fail)
        bob.transport.serve(ECHO, echo)
        stream = await alice.transport.open_stream(bob.id, "/swarm/fail/1.0.0")
        await stream.send(b"x")
        with pytest.raises(StreamError):
            await stream.receive()
        other = await alice.transport.open_stream(bob.id, ECHO)
        await other.send(b"still here")
        assert await other.receive() == b"still here"


async def test_a_reset_reaches_the_other_side(network: Network) -> None:
    async with network.pair() as (alice, bob):
        seen = trio.Event()

        async def expect_reset(stream: Stream) -> None:
            assert await stream.receive() == b"x"
            with pytest.raises(StreamError):
                await stream.receive()
            seen.set()

        bob.transport.serve(ECHO, expect_reset)
        stream = await alice.transport.open_stream(bob.id, ECHO)
        await stream.send(b"x")
        await trio.sleep(0.1)  # a reset may overtake what it follows
        await stream.reset()
        await seen.wait()
        with pytest.raises(StreamError, match="reset by this side"):
            await stream.send(b"y")


async def test_sudden_death_is_no_clean_end(network: Network) -> None:
    async with network.peer(ALICE) as alice:
        async with network.peer(BOB) as bob:
            bob.transport.serve(ECHO, echo)
            await alice.transport.connect(bob.id, bob.transport.addresses())
            events = alice.transport.connection_events()
            stream = await alice.transport.open_stream(bob.id, ECHO)
            await stream.send(b"x")
            assert await stream.receive() == b"x"
        with pytest.raises(StreamError):
            await stream.receive()
        assert await events.receive() == ConnectionEvent(BOB.peer_id, connected=False)
        assert alice.transport.connected() == []


async def test_a_sender_waits_for_a_reader_that_stalls(network: Network) -> None:
    async with network.pair() as (alice, bob):
        read_on = trio.Event()
        got = []

        async def read_late(stream: Stream) -> None:
            await read_on.wait()
            while (frame := await stream.receive()) is not None:
                got.append(len(frame))

        bob.transport.serve(ECHO, read_late)
        bob.transport.vouch(alice.id, 60)
        stream = await alice.transport.open_stream(bob.id, ECHO)
        sent = []

        async def send() -> None:
            for size in [10_000] * 99 + [1_000_000]:
                await stream.send(bytes(size))
                sent.append(size)
            await stream.end()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.sleep(0.3)
            assert 250_000 <= sum(sent) <= limits.STREAM_WINDOW_BYTES + 10_000
            read_on.set()
            assert await stream.receive() is None
        assert got == sent


async def test_a_reader_that_never_reads_is_given_up(network: Network) -> None:
    async with network.pair() as (alice, bob):

        async def ignore(stream: Stream) -> None:
            await trio.sleep_forever()

        bob.transport.serve(ECHO, ignore)
        stream = await alice.transport.open_stream(bob.id, ECHO)
        with pytest.raises(StreamError, match=f"{bob.id}.*not read"):
            for _ in range(1000):
                await stream.send(bytes(10_000))


async def test_a_frame_beyond_the_protocols_bound_resets(network: Network) -> None:
    async with network.pair() as (alice, bob):
        bob.transport.serve(ECHO, echo, frame_bytes_max=1000)
        stream = await alice.transport.open_stream(bob.id, ECHO)
        await stream.send(bytes(1000))
        assert await stream.receive() == bytes(1000)
        await stream.send(bytes(1001))
        with pytest.raises(StreamError):
            await stream.receive()


async def test_what_cannot_be_opened_says_why(network: Network) -> None:
    async with network.pair() as (alice, bob):
        with pytest.raises(StreamError, match="does not speak it"):
            await alice.transport.open_stream(bob.id, "/swarm/none/1.0.0")
        with pytest.raises(StreamError, match="not connected"):
            await alice.transport.open_stream(CAROL.peer_id, ECHO)
        bob.transport.serve(ECHO, echo)
        with pytest.raises(ValueError, match="already"):
            bob.transport.serve(ECHO, echo)


async def test_one_peer_cannot_hold_all_streams(network: Network, monkeypatch) -> None:
    monkeypatch.setattr(base, "STREAMS_PER_PEER_MAX", 3)
    async with network.pair() as (alice, bob):
        bob.transport.serve(ECHO, echo)
        streams = []
        for _ in range(3):
            streams.append(await alice.transport.open_stream(bob.id, ECHO))
            await streams[-1].send(b"x")
            assert await streams[-1].receive() == b"x"
        with pytest.raises(StreamError):
            extra = await alice.transport.open_stream(bob.id, ECHO)
            await extra.receive()
        await streams[0].end()
        assert await streams[0].receive() is None
        await trio.sleep(0.2)
        again = await alice.transport.open_stream(bob.id, ECHO)
        await again.send(b"y")
        assert await again.receive() == b"y"


# --- connections -----------------------------------------------------------------------------


@pytest.mark.wall_clock
async def test_strangers_cannot_make_a_peer_hold_more_than_so_much(tmp_path, monkeypatch) -> None:
    """Each stream has its window and an unfinished frame; keys, and so streams, cost nothing."""
    monkeypatch.setattr(base, "STREAMS_HELD_BYTES_MAX", 1_000_000)
    network = Network("libp2p", tmp_path)

    async def send_half(stream: Stream, size: int) -> None:
        await carrier(stream).write(encode_frame(bytes(size))[:-1])

    def carrier(stream: Stream) -> ByteStream:
        return cast(FramedStream, stream)._carrier

    async with AsyncExitStack() as stack:
        bob = await stack.enter_async_context(network.peer(BOB))
        bob.transport.serve(ECHO, echo)
        bob.transport.vouch(ALICE.peer_id, 3600)
        alice = await stack.enter_async_context(network.peer(ALICE))
        await alice.transport.connect(bob.id, bob.transport.addresses())
        honest = [await alice.transport.open_stream(bob.id, ECHO) for _ in range(3)]
        for stream in honest:
            await send_half(stream, 100_000)
        for key in range(10, 30):
            mallory = await stack.enter_async_context(network.peer(Identity(bytes([key]) * 32)))
            await mallory.transport.connect(bob.id, bob.transport.addresses())
            stream = await mallory.transport.open_stream(bob.id, ECHO)
            await send_half(stream, 200_000)
            await trio.sleep(0.1)
            assert bob.transport._held_bytes <= 1_000_000  # type: ignore[attr-defined]
        held = [stream.peer for stream in bob.transport._holding]  # type: ignore[attr-defined]
        assert held.count(ALICE.peer_id) == 3
        assert len(held) == 3 + 3  # there is room for three of the others
        for stream in honest:
            await carrier(stream).write(b"\0")
            assert await stream.receive() == bytes(100_000)


async def test_connections_are_announced_on_both_sides(network: Network) -> None:
    async with network.peer(ALICE) as alice, network.peer(BOB) as bob:
        at_alice, at_bob = (p.transport.connection_events() for p in (alice, bob))
        await alice.transport.connect(bob.id, bob.transport.addresses())
        await alice.transport.connect(bob.id, [])  # at once, whatever the addresses
        assert await at_alice.receive() == ConnectionEvent(bob.id, connected=True)
        assert await at_bob.receive() == ConnectionEvent(alice.id, connected=True)
        assert alice.transport.connected() == [bob.id]
        assert bob.transport.connected() == [alice.id]
        await bob.transport.disconnect(alice.id)
        assert await at_alice.receive() == ConnectionEvent(bob.id, connected=False)
        assert await at_bob.receive() == ConnectionEvent(alice.id, connected=False)
        assert alice.transport.connected() == bob.transport.connected() == []
        await bob.transport.connect(alice.id, alice.transport.addresses())
        assert await at_alice.receive() == ConnectionEvent(bob.id, connected=True)


async def test_addresses_are_tried_in_turn_and_each_failure_has_a_reason(network: Network) -> None:
    async with network.peer(ALICE) as alice, network.peer(BOB) as bob:
        nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{bob.id}"
        bad = ["rubbish", f"/ip4/127.0.0.1/tcp/9/p2p/{CAROL.peer_id}", nobody]
        with pytest.raises(ConnectError) as caught:
            await alice.transport.connect(bob.id, bad)
        text = str(caught.value)
        assert bob.id in text
        own = f"/p2p/{bob.id}"  # which the sentence names already
        assert all(address.removesuffix(own) in text for address in bad)
        assert "another peer" in text
        with pytest.raises(ConnectError, match="no address"):
            await alice.transport.connect(bob.id, [])
        await alice.transport.connect(bob.id, [*bad, *bob.transport.addresses()])
        assert alice.transport.connected() == [bob.id]


async def test_somebody_else_at_the_address_is_not_the_peer(network: Network) -> None:
    async with network.peer(ALICE) as alice, network.peer(BOB) as bob:
        bare = bob.transport.addresses()[0].partition("/p2p/")[0]
        with pytest.raises(ConnectError):
            await alice.transport.connect(CAROL.peer_id, [f"{bare}/p2p/{CAROL.peer_id}"])
        assert alice.transport.connected() == []


async def test_a_banned_peer_is_dropped_and_refused_both_ways_for_a_while(network: Network) -> None:
    async with network.pair() as (alice, bob):
        events = bob.transport.connection_events()
        bob.transport.ban(alice.id, 0.8)
        assert await events.receive() == ConnectionEvent(alice.id, connected=False)
        with pytest.raises(ConnectError, match="banned"):
            await bob.transport.connect(alice.id, alice.transport.addresses())
        gone = alice.transport.connection_events()
        while bob.id in alice.transport.connected():
            await gone.receive()
        with contextlib.suppress(ConnectError):  # over libp2p it may seem to work at first
            await alice.transport.connect(bob.id, bob.transport.addresses())
        assert alice.id not in bob.transport.connected()
        await trio.sleep(1.0)
        await bob.transport.connect(alice.id, alice.transport.addresses())
        assert alice.id in bob.transport.connected()


async def test_a_subscriber_that_lags_loses_the_oldest_events(
    network: Network, monkeypatch
) -> None:
    monkeypatch.setattr(base, "CONNECTION_EVENTS_MAX", 2)
    async with network.peer(ALICE) as alice, network.peer(BOB) as bob:
        lagging = alice.transport.connection_events()
        at_bob = bob.transport.connection_events()
        closed = alice.transport.connection_events()
        closed.close()
        for _ in range(2):
            await alice.transport.connect(bob.id, bob.transport.addresses())
            await alice.transport.disconnect(bob.id)
            while (await at_bob.receive()).connected:
                pass
        await alice.transport.connect(bob.id, bob.transport.addresses())
        assert [(await lagging.receive()).connected for _ in range(2)] == [False, True]
        with pytest.raises(trio.WouldBlock):
            lagging.receive_nowait()


# --- the bulk plane --------------------------------------------------------------------------

DATA = random.Random(5).randbytes(3_000_001)


def source_of(peer: Peer) -> Source:
    return Source(peer.id, tuple(peer.transport.bulk_addresses()))


async def test_a_blob_is_fetched_from_the_middle_of_a_file(network: Network) -> None:
    async with network.pair() as (alice, bob):
        service = Service()
        bob.transport.serve_bulk(service)
        alice.transport.set_credential(b"my admission")
        reference = service.offer(bob.disk, DATA, pad=77)
        for _ in range(3):
            sink = Sink(len(DATA))
            piece = await alice.transport.fetch(source_of(bob), reference, sink)
            assert bytes(sink.data) == DATA
            assert piece.verify(reference.digest)
        assert service.asked == [(alice.id, b"my admission")]  # once a connection
        assert service.clients == [alice.id] * 3
        assert service.released == 3
        assert alice.transport.traffic.received == 3 * len(DATA)
        assert bob.transport.traffic.sent == 3 * len(DATA)


async def test_a_run_of_blobs_arrives_in_order_up_to_the_first_that_fails(network: Network) -> None:
    async with network.pair() as (alice, bob):
        service = Service()
        bob.transport.serve_bulk(service)
        parts = [b"tiny", DATA, b"t", DATA[:1000], b"end"]
        references = [
            service.offer(bob.disk, part, path=str(number), pad=number)
            for number, part in enumerate(parts)
        ]

        async def fetch(wanted: list[BlobReference]) -> list[bytes]:
            sinks = [Sink(reference.size_bytes) for reference in wanted]
            arrived: list[bytes] = []

            async def take(piece) -> None:
                here = len(arrived)
                assert piece.verify(wanted[here].digest)
                assert not any(sink.data for sink in sinks[here + 1 :])
                arrived.append(bytes(sinks[here].data))
                await trio.lowlevel.checkpoint()

            try:
                await alice.transport.fetch_run(
                    source_of(bob), list(zip(wanted, sinks, strict=True)), take
                )
            except FetchError as error:
                assert "404" in str(error)
                arrived.append(b"failed")
            return arrived

        assert await fetch(references) == parts
        unknown = BlobReference(bytes(32), 5)
        broken = [references[0], references[2], unknown, references[3]]
        assert await fetch(broken) == [b"tiny", b"t", b"failed"]
        assert await fetch(references[::-1]) == parts[::-1]
        assert service.released == len(service.clients) - 1  # the unknown one was never opened
        assert alice.transport.traffic.received >= 2 * sum(map(len, parts))


async def test_without_a_bulk_address_the_connection_carries_the_blob(network: Network) -> None:
    async with network.pair() as (alice, bob):
        service = Service()
        bob.transport.serve_bulk(service)
        alice.transport.set_credential(b"c")
        reference = service.offer(bob.disk, DATA)
        sink = Sink(len(DATA))
        piece = await alice.transport.fetch(Source(bob.id), reference, sink)
        assert piece.verify(reference.digest)
        assert service.asked == [(alice.id, b"c")]
        assert service.released == 1
        mine = alice.disk.put("mine", DATA[:100_000])
        await alice.transport.push(Source(bob.id), mine, "mine")
        assert service.pushed == {mine.digest: DATA[:100_000]}
        with pytest.raises(FetchError, match="404"):
            await alice.transport.fetch(Source(bob.id), BlobReference(bytes(32), 1), Sink(1))


async def test_a_push_arrives_or_says_why_not(network: Network) -> None:
    async with network.pair() as (alice, bob):
        service = Service()
        bob.transport.serve_bulk(service)
        reference = alice.disk.put("mine", DATA)
        await alice.transport.push(source_of(bob), reference, "mine")
        assert service.pushed == {reference.digest: DATA}
        assert service.clients == [alice.id]
        assert bob.transport.traffic.received == len(DATA)

        service.quota = 10
        with pytest.raises(FetchError, match="413 over the quota") as refused:
            await alice.transport.push(source_of(bob), reference, "mine")
        assert not refused.value.retry
        service.quota = 10 << 20
        lie = BlobReference(bytes(32), len(DATA))
        with pytest.raises(FetchError, match="422"):
            await alice.transport.push(source_of(bob), lie, "mine")
        assert service.sinks[-1].abandoned
        assert len(service.pushed) == 1
        with pytest.raises(FetchError, match="3000001 bytes, not 5"):
            await alice.transport.push(source_of(bob), BlobReference(reference.digest, 5), "mine")


@pytest.mark.parametrize("by_stream", [False, True])
async def test_a_source_that_declines_says_so_and_whether_to_come_again(
    network: Network, by_stream: bool
) -> None:
    async with network.pair() as (alice, bob):
        source = Source(bob.id) if by_stream else source_of(bob)
        service = Service()
        sink = Sink(10)
        with pytest.raises(FetchError):  # serves nothing at all yet
            await alice.transport.fetch(source, BlobReference(bytes(32), 10), sink)
        bob.transport.serve_bulk(service)
        with pytest.raises(FetchError, match="404 no such blob here") as unknown:
            await alice.transport.fetch(source, BlobReference(bytes(32), 10), sink)
        assert unknown.value.retry
        reference = service.offer(bob.disk, DATA)
        with pytest.raises(FetchError, match=f"{len(DATA)} bytes of a blob of 10"):
            await alice.transport.fetch(source, BlobReference(reference.digest, 10), sink)
        assert not sink.data
        alice.transport.set_credential(b"another")  # asked anew
        service.admitted.clear()
        with pytest.raises(FetchError, match=r"403.*not admitted") as refused:
            await alice.transport.fetch(source, reference, Sink(len(DATA)))
        assert not refused.value.retry
        assert service.released == 1


async def test_bytes_with_another_hash_arrive_and_do_not_verify(network: Network) -> None:
    async with network.pair() as (alice, bob):
        service = Service()
        bob.transport.serve_bulk(service)
        reference = service.offer(bob.disk, DATA)
        bob.disk.put("blob", bytes(len(DATA)))
        piece = await alice.transport.fetch(source_of(bob), reference, Sink(len(DATA)))
        assert not piece.verify(reference.digest)


async def test_a_mirror_is_asked_without_a_name(network: Network) -> None:
    async with network.peer(ALICE) as alice, network.peer(BOB) as bob:
        service = Service()
        bob.transport.serve_bulk(service)
        reference = service.offer(bob.disk, DATA)
        mirror = Source(None, tuple(bob.transport.bulk_addresses()))
        piece = await alice.transport.fetch(mirror, reference, Sink(len(DATA)))
        assert piece.verify(reference.digest)
        assert service.asked == [(None, b"")]
        assert service.clients == [None]


async def test_nobody_there_is_a_fetch_error(network: Network) -> None:
    async with network.peer(ALICE) as alice:
        for source in (
            Source(CAROL.peer_id),
            Source(CAROL.peer_id, ("http://127.0.0.1:1",)),
            Source(None, ("http://127.0.0.1:1",)),
            Source(None, ("ftp://nowhere", "rubbish")),
            Source(),
        ):
            with pytest.raises(FetchError) as caught:
                await alice.transport.fetch(source, BlobReference(bytes(32), 1), Sink(1))
            assert not caught.value.retry
