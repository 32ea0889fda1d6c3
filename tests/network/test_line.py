"""Lines and clocks measured between peers, one of which may lie, stall or send without end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from swarm.errors import PeerError
from swarm.node import line
from swarm.node.line import Ask, Declined, LineService, Offer, measure_line, read_clock
from swarm.transport import Stream, Transport
from swarm.transport.rates import HOUR
from tests.memory_network import MemoryNetwork
from tests.network.harness import identity
from tests.transport.harness import FolderDisk
from tests.worlds import WALL, VirtualWorld

encode = msgspec.msgpack.encode


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@asynccontextmanager
async def two_peers(tmp_path) -> AsyncIterator[tuple[Transport, Transport]]:
    """A connected pair, 50 ms apart."""
    network = MemoryNetwork()
    network.latency_seconds = 0.05
    async with (
        network.transport(identity(1), world=VirtualWorld(), disk=FolderDisk(tmp_path / "a")) as a,
        network.transport(identity(2), world=VirtualWorld(), disk=FolderDisk(tmp_path / "b")) as b,
    ):
        await a.connect(b.peer_id, b.addresses())
        yield a, b


def test_a_line_and_a_clock_are_measured(tmp_path) -> None:
    async def main() -> None:
        async with two_peers(tmp_path) as (asking, other):
            theirs = VirtualWorld()
            theirs.skew_seconds = 90.0
            LineService(other, theirs)
            clock = await read_clock(asking, VirtualWorld(), other.peer_id)
            assert clock.ahead_seconds == pytest.approx(90.0, abs=0.06)
            assert 0.1 <= clock.round_trip_seconds < 0.25
            before = trio.current_time()
            reading = await measure_line(asking, VirtualWorld(), other.peer_id)
            assert trio.current_time() - before < line.MEASURE_SECONDS
            assert reading.moved_bytes == 2 * line.STREAMS * line.STREAM_BYTES_MAX
            # The credit of 256 KiB per stream and round trip is what limits a line without a limit.
            assert 1e6 < reading.up_bytes_per_second < 50e6
            assert 1e6 < reading.down_bytes_per_second < 50e6

    in_virtual_time(main)


def test_an_hour_gives_each_peer_only_so_many_bytes(tmp_path) -> None:
    async def main() -> None:
        async with two_peers(tmp_path) as (asking, other):
            LineService(other, VirtualWorld())
            measured = 0
            with pytest.raises(Declined, match="measured enough in this hour"):
                for _ in range(100):
                    reading = await measure_line(asking, VirtualWorld(), other.peer_id)
                    measured += reading.moved_bytes
            assert measured == 2 * line.HOURLY.network
            await read_clock(asking, VirtualWorld(), other.peer_id)  # costs nothing
            await trio.sleep(HOUR)
            await measure_line(asking, VirtualWorld(), other.peer_id)

    in_virtual_time(main)


def test_streams_that_are_opened_at_once_are_counted(tmp_path) -> None:
    offered: list[int] = []

    async def main() -> None:
        async with two_peers(tmp_path) as (asking, other):
            LineService(other, VirtualWorld())

            async def ask() -> None:
                _, offer = await line._open(asking, other.peer_id, line.STREAM_BYTES_MAX)
                offered.append(offer.size_bytes)

            async with trio.open_nursery() as nursery:
                for _ in range(4 * line.STREAMS):
                    nursery.start_soon(ask)

    in_virtual_time(main)
    assert sum(map(bool, offered)) == line.STREAMS


def test_only_what_was_moved_is_counted(tmp_path) -> None:
    async def main() -> None:
        async with two_peers(tmp_path) as (asking, other):
            LineService(other, VirtualWorld())
            for _ in range(2 * line.HOURLY.network // line.STREAM_BYTES_MAX):
                stream, offer = await line._open(asking, other.peer_id, line.STREAM_BYTES_MAX)
                assert offer.size_bytes == line.STREAM_BYTES_MAX, offer.reason
                await stream.reset()
            await measure_line(asking, VirtualWorld(), other.peer_id)

    in_virtual_time(main)


@pytest.mark.parametrize("size", [1, line.STREAM_BYTES_MAX])
def test_asking_without_moving_bytes_ends_as_well(tmp_path, size: int) -> None:
    async def main() -> None:
        async with two_peers(tmp_path) as (asking, other):
            LineService(other, VirtualWorld())
            with pytest.raises(Declined, match="measured enough in this hour"):
                for _ in range(10 * line.HOURLY.network // line.STREAM_BYTES_MIN):
                    stream, offer = await line._open(asking, other.peer_id, size)
                    if not offer.size_bytes:
                        raise Declined(offer.reason)
                    await stream.reset()

    in_virtual_time(main)


def test_holding_streams_without_moving_bytes_takes_little_of_an_hour(tmp_path) -> None:
    async def main() -> None:
        async with two_peers(tmp_path) as (asking, other):
            LineService(other, VirtualWorld())
            before = trio.current_time()
            with pytest.raises(Declined, match="measured enough in this hour"):
                while True:
                    stream, offer = await line._open(asking, other.peer_id, 1)
                    if not offer.size_bytes:
                        raise Declined(offer.reason)
                    with pytest.raises(PeerError):  # reset after `MEASURE_SECONDS`
                        await stream.receive()
            assert trio.current_time() - before < 0.1 * HOUR

    in_virtual_time(main)


def test_a_busy_peer_declines(tmp_path) -> None:
    async def main() -> None:
        async with two_peers(tmp_path) as (asking, other):
            LineService(other, VirtualWorld())

            async def move() -> None:
                while True:
                    other.traffic.sent += 1 << 20
                    await trio.sleep(0.05)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(move)
                with pytest.raises(Declined, match="busy with pieces"):
                    await measure_line(asking, VirtualWorld(), other.peer_id)
                nursery.cancel_scope.cancel()

    in_virtual_time(main)


def test_nobody_gets_more_than_was_sent(tmp_path) -> None:
    async def main() -> None:
        async with two_peers(tmp_path) as (asking, other):
            LineService(other, VirtualWorld())
            stream = await asking.open_stream(other.peer_id, line.PROTOCOL)
            await stream.send(encode(Ask(1 << 20)))
            assert msgspec.msgpack.decode(await stream.receive() or b"", type=Offer).size_bytes
            await stream.send(b"x" * 100)
            await stream.end()
            received = 0
            while (frame := await stream.receive()) is not None:
                received += len(frame)
            assert received == 100
            idle = await asking.open_stream(other.peer_id, line.PROTOCOL)
            before = trio.current_time()
            with pytest.raises(PeerError):  # reset: it never asked
                await idle.receive()
            assert trio.current_time() - before < line.MEASURE_SECONDS + 1

    in_virtual_time(main)


async def send_without_end(stream: Stream) -> None:
    await stream.receive()
    await stream.send(encode(Offer(int(WALL * 1000), 1 << 20)))
    while True:
        await stream.send(bytes(line.FRAME_BYTES))


async def say_nothing(stream: Stream) -> None:
    await trio.sleep_forever()


async def offer_too_much(stream: Stream) -> None:
    ask = msgspec.msgpack.decode(await stream.receive() or b"", type=Ask)
    await stream.send(encode(Offer(0, min(1 << 20, ask.size_bytes + 1))))


async def babble(stream: Stream) -> None:
    await stream.send(b"\xc1" * 1000)


async def keep_all(stream: Stream) -> None:
    ask = msgspec.msgpack.decode(await stream.receive() or b"", type=Ask)
    await stream.send(encode(Offer(2**53, ask.size_bytes)))
    while await stream.receive() is not None:
        pass


@pytest.mark.parametrize(
    "hostile", [send_without_end, say_nothing, offer_too_much, babble, keep_all]
)
def test_a_hostile_peer_only_yields_a_sentence(tmp_path, hostile) -> None:
    async def main() -> None:
        async with two_peers(tmp_path) as (asking, other):
            other.serve(line.PROTOCOL, hostile)
            before = trio.current_time()
            with pytest.raises(PeerError) as caught:
                await measure_line(asking, VirtualWorld(), other.peer_id)
            assert other.peer_id in str(caught.value)
            assert trio.current_time() - before <= line.MEASURE_SECONDS + 2

    in_virtual_time(main)
