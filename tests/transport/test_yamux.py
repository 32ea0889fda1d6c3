"""The muxer by itself, over memory and in virtual time: two honest sides, and one that is not."""

from __future__ import annotations

import contextlib
import itertools
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset
from libp2p.stream_muxer.yamux.yamux import Yamux as TheirYamux

from swarm.transport import limits
from swarm.transport.libp2p import yamux
from swarm.transport.libp2p.yamux import WINDOW_BYTES, Shared, Yamux, YamuxError

from .hostile import ACK, DATA, FIN, FRAME, PING, RST, SYN, WINDOW, data, frame


class Carrier:
    """An end of a pipe, as libp2p's noise has it."""

    def __init__(self, stream, is_initiator: bool) -> None:
        self._stream = stream
        self.is_initiator = is_initiator

    async def read(self, n: int | None = None) -> bytes:
        got = await self._stream.receive_some(n)
        if not got:
            raise trio.BrokenResourceError
        return got

    async def write(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def close(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def pair():
    """Two muxers with each other."""
    near, far = trio.testing.memory_stream_pair()
    muxers = [
        Yamux(Carrier(near, True), "near", Shared()),
        Yamux(Carrier(far, False), "far", Shared()),
    ]
    async with trio.open_nursery() as nursery:
        for muxer in muxers:
            await nursery.start(started, muxer)
        yield muxers
        for muxer in muxers:
            await muxer.close()


async def started(muxer: Yamux, task_status=trio.TASK_STATUS_IGNORED) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(muxer.start)
        await muxer.event_started.wait()
        task_status.started()


def connection(vouched: bool, network: str = "192.0.2.0/24") -> SimpleNamespace:
    """What the connection table says of a muxer's peer."""
    origin = SimpleNamespace(range=network)
    return SimpleNamespace(vouched=vouched, needed=False, origin=origin)


class Stranger:
    """A muxer under test, and the raw bytes of the other side, which opened the connection."""

    def __init__(self, shared: Shared | None = None) -> None:
        self.pipe, end = trio.testing.memory_stream_pair()
        self.overruns: list[str] = []
        self.shared = shared or Shared()
        self.muxer = Yamux(Carrier(end, False), "stranger", self.shared, self.overruns.append)
        self.muxer.connection = connection(True)  # so that its rate is not bounded
        self.broken: YamuxError | None = None
        self.answers: list[tuple[int, int, int, int]] = []

    async def live(self, task_status=trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read)
            task_status.started()
            try:
                await self.muxer.start()
            except YamuxError as error:
                self.broken = error

    async def _read(self) -> None:
        buffer = bytearray()
        with contextlib.suppress(trio.ClosedResourceError):
            async for got in self.pipe:
                buffer += got
                while len(buffer) >= FRAME.size:
                    _, *answer = FRAME.unpack_from(buffer)
                    del buffer[: FRAME.size]  # it never sends data
                    self.answers.append(tuple(answer))

    async def send(self, *frames: bytes) -> None:
        """Send frames and let them be dealt with."""
        with contextlib.suppress(trio.BrokenResourceError):
            await self.pipe.send_all(b"".join(frames))
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def stranger(shared: Shared | None = None):
    other = Stranger(shared)
    async with trio.open_nursery() as nursery:
        await nursery.start(other.live)
        yield other
        await other.pipe.aclose()
    assert other.muxer.unread_bytes == 0
    assert not other.muxer.streams


@pytest.mark.parametrize("ours_opens", [True, False])
async def test_libp2ps_own_muxer_understands_ours(ours_opens: bool) -> None:
    sent = bytes(range(256)) * 4096  # 1 MiB
    near, far = trio.testing.memory_stream_pair()
    ours = Yamux(Carrier(near, ours_opens), "theirs", Shared())
    theirs = TheirYamux(Carrier(far, not ours_opens), "ours")

    async def nothing() -> None: ...

    theirs.on_close = nothing

    async def write(stream) -> None:
        await stream.write(sent)
        await stream.close()

    async def read(stream) -> None:
        got = bytearray()
        with pytest.raises(MuxedStreamEOF):
            while True:
                got += await stream.read(65536)
        assert got == sent

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.start)
        nursery.start_soon(theirs.start)
        await ours.event_started.wait()
        await theirs.event_started.wait()
        opener, other = (ours, theirs) if ours_opens else (theirs, ours)
        stream = await opener.open_stream()
        there = await other.accept_stream()
        async with trio.open_nursery() as both:
            for end in (stream, there):
                both.start_soon(write, end)
                both.start_soon(read, end)
        await ours.ping()
        assert not ours.streams
        await theirs.close()
        await ours.event_closed.wait()


async def test_more_than_a_window_arrives_whole_while_it_is_read() -> None:
    sent = bytes(range(256)) * 8192  # 2 MiB
    async with pair() as (near, far):
        stream = await near.open_stream()
        there = await far.accept_stream()

        async def write() -> None:
            await stream.write(sent)
            await stream.close()

        got = bytearray()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            with pytest.raises(MuxedStreamEOF):
                while True:
                    got += await there.read(1000)
        assert got == sent
        await there.write(b"bye")
        assert await stream.read() == b"bye"
        await there.close()
        with pytest.raises(MuxedStreamEOF):
            await stream.read()
        with pytest.raises(MuxedStreamClosed):
            await stream.write(b"more")
        assert not near.streams
        assert not far.streams


async def test_a_writer_waits_for_a_reader_that_lags_and_is_never_cut_off() -> None:
    async with pair() as (near, far):
        stream = await near.open_stream()
        there = await far.accept_stream()
        await stream.write(bytes(WINDOW_BYTES - 10))
        with trio.move_on_after(60) as scope:
            await stream.write(bytes(20))
        assert scope.cancelled_caught  # half way: the other half would garble what comes after
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(MuxedStreamReset):
            await there.read()
        assert far.unread_bytes == 0


async def test_a_ping_is_answered_and_the_end_reaches_every_stream() -> None:
    async with pair() as (near, far):
        await near.ping()
        stream = await near.open_stream()
        await far.accept_stream()
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                with pytest.raises(MuxedStreamReset):
                    await stream.read()

            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            await far.close()
        await near.event_closed.wait()


async def test_a_stream_that_overruns_its_window_is_reset_and_its_neighbour_is_not() -> None:
    async with stranger() as other:
        await other.send(frame(WINDOW, SYN, 1, 0), frame(WINDOW, SYN, 3, 0))
        await other.send(data(3, b"kept"))
        for _ in range(4):
            await other.send(data(1, bytes(WINDOW_BYTES // 4)))
        assert other.muxer.unread_bytes == WINDOW_BYTES + 4
        await other.send(data(1, b"x"))
        assert (WINDOW, RST, 1, 0) in other.answers
        assert other.muxer.unread_bytes == 4
        assert len(other.overruns) == 1
        await other.send(data(1, bytes(1000)))  # it is no stream any longer
        assert other.muxer.unread_bytes == 4
        assert other.muxer.streams.keys() == {3}


async def test_overrunning_again_and_again_ends_the_connection() -> None:
    async with stranger() as other:
        for number in range(1, 2 * yamux.MUXER_OVERRUNS_MAX, 2):
            assert not other.muxer.is_closed
            await other.send(frame(WINDOW, SYN, number, 0))
            for _ in range(2):
                await other.send(data(number, bytes(WINDOW_BYTES * 2 // 3)))
        assert other.muxer.is_closed
        assert len(other.overruns) == yamux.MUXER_OVERRUNS_MAX


async def test_one_connection_and_all_together_hold_so_much() -> None:
    shared = Shared()
    async with contextlib.AsyncExitStack() as stack:
        fill = yamux.MUXER_UNREAD_BYTES_MAX // WINDOW_BYTES
        others = []
        for _ in range(2 + yamux.UNREAD_BYTES_MAX // yamux.MUXER_UNREAD_BYTES_MAX):
            other = await stack.enter_async_context(stranger(shared))
            others.append(other)
            for number in range(1, 2 * fill + 4, 2):
                await other.send(data(number, bytes(WINDOW_BYTES), SYN))
                assert other.muxer.unread_bytes <= yamux.MUXER_UNREAD_BYTES_MAX
                assert shared.size_bytes <= yamux.UNREAD_BYTES_MAX
        assert all(other.overruns for other in others)
        # Whoever holds little keeps it: room is made by those who hold most.
        modest = await stack.enter_async_context(stranger(shared))
        await modest.send(data(1, bytes(WINDOW_BYTES), SYN))
        assert modest.muxer.unread_bytes == WINDOW_BYTES
        assert not modest.overruns


async def test_a_connection_that_ends_holds_nothing_while_its_last_frame_is_stuck() -> None:
    async def stuck(data: bytes) -> None:
        await trio.sleep_forever()

    async with stranger() as other:
        numbers = range(1, 2 * yamux.MUXER_UNREAD_BYTES_MAX // WINDOW_BYTES + 2, 2)
        await other.send(*(frame(WINDOW, SYN, number, 0) for number in numbers))
        other.muxer.secured_conn.write = stuck
        await other.send(*(data(number, bytes(WINDOW_BYTES)) for number in numbers))
        assert other.overruns and other.shared.size_bytes
        await other.pipe.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert not other.muxer.is_closed, "the reset is still being written"
        assert other.shared.size_bytes == 0


async def test_streams_beyond_the_limit_are_refused() -> None:
    async with stranger() as other:
        limit = yamux.MUXER_STREAMS_MAX
        for number in range(1, 2 * limit + 20, 2):
            await other.send(frame(WINDOW, SYN, number, 0))
        assert len(other.muxer.streams) == limit
        assert (WINDOW, RST, 2 * limit + 1, 0) in other.answers
        await other.send(frame(WINDOW, RST, 1, 0), frame(WINDOW, SYN, 2 * limit + 21, 0))
        assert not other.muxer.is_closed
        await other.muxer.accept_stream()
        other.muxer.connection.vouched = False
        await other.send(*(frame(WINDOW, SYN, 2 * limit + n, 0) for n in range(23, 41, 2)))
        assert other.muxer.is_closed
        assert other.muxer.expelled


@pytest.mark.parametrize("what", ["streams", "frames"])
async def test_strangers_of_one_network_are_read_at_a_rate_and_others_as_ever(what: str) -> None:
    """Also when each stream ends at once, so that there are never many, and several identities."""
    limit = yamux.STRANGERS_FRAMES_BURST + 10 * yamux.STRANGERS_FRAMES_PER_SECOND
    each = yamux.MUXER_FRAMES_PER_STREAM + 2 if what == "streams" else 1
    count = int(limit / 16 / each)  # of sixteen identities

    def flood(count: int) -> bytes:
        opening = (frame(WINDOW, SYN, n, 0) + frame(WINDOW, RST, n, 0) for n in range(1, 512, 2))
        sent = list(itertools.islice(opening, count)) if what == "streams" else []
        return b"".join(sent or [frame(WINDOW, 0, 1, 0)] * count) + frame(PING, SYN, 0, 7)

    async def seconds(shared: Shared, network: str, count: int, *, vouched: bool = False) -> float:
        async with stranger(shared) as other:
            other.muxer.connection = connection(vouched, network)
            began = trio.current_time()
            await other.send(flood(count))
            while not any(kind == PING for kind, *_ in other.answers):  # noqa: ASYNC110
                await trio.sleep(0.01)
            return trio.current_time() - began

    shared = Shared()
    took: list[float] = []

    async def be() -> None:
        took.append(await seconds(shared, "198.51.100.0/24", count))

    async with trio.open_nursery() as nursery:
        for _ in range(16):
            nursery.start_soon(be)
        await trio.sleep(3)
        assert await seconds(shared, "203.0.113.0/24", count) < 0.1
        assert await seconds(shared, "198.51.100.0/24", count, vouched=True) < 0.1
    assert 9 < max(took) < 11


@pytest.mark.parametrize(
    "broken",
    [
        frame(DATA, 0, 1, 0, version=1),
        frame(4, 0, 1, 0),
        frame(255, 65535, 1, 0),
        frame(WINDOW, SYN, 2, 0),
        frame(WINDOW, SYN, 0, 0),
        frame(DATA, 0, 0, 0),
        frame(DATA, SYN, 1, WINDOW_BYTES + 1),
        frame(DATA, 0, 1, 2**32 - 1),
        frame(WINDOW, SYN, 1, 0) * 2,
    ],
)
async def test_a_broken_protocol_ends_the_connection(broken: bytes) -> None:
    async with stranger() as other:
        await other.send(broken)
        assert other.muxer.is_closed
        assert other.broken is not None


@pytest.mark.parametrize(
    "odd",
    [
        frame(WINDOW, SYN | RST, 1, 0),
        data(9, b"to nobody"),
        frame(WINDOW, 0, 9, 2**32 - 1),
        frame(WINDOW, FIN, 9, 0),
        frame(WINDOW, RST, 9, 0),
        frame(PING, ACK, 0, 7),
        frame(WINDOW, SYN | FIN, 1, 0) + frame(WINDOW, 0, 1, 2**32 - 1) * 3,
        data(1, b"", SYN) + data(1, b"", FIN) + frame(WINDOW, FIN, 1, 0),
    ],
)
async def test_what_is_only_odd_does_not(odd: bytes) -> None:
    async with stranger() as other:
        await other.send(odd, frame(PING, SYN, 0, 42))
        assert (PING, ACK, 0, 42) in other.answers


async def test_a_flood_of_small_frames_slows_its_own_connection() -> None:
    async with stranger() as other:
        at_once = int(yamux.MUXER_FRAMES_BURST / yamux.MUXER_FRAMES_PER_PING)
        a_second = int(yamux.MUXER_FRAMES_PER_SECOND / yamux.MUXER_FRAMES_PER_PING)
        await other.send(frame(PING, SYN, 0, 1) * 2 * at_once)
        assert at_once <= len(other.answers) <= at_once + 1
        with trio.move_on_after(3):
            await trio.sleep_forever()
        assert at_once + 2.9 * a_second < len(other.answers) < at_once + 3.1 * a_second


async def test_whoever_does_not_read_its_answers_is_left() -> None:
    near, far = trio.testing.lockstep_stream_pair()  # writes wait for the reader
    muxer = Yamux(Carrier(far, False), "stranger", Shared())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(muxer.start)
        await near.send_all(frame(PING, SYN, 0, 1))
        began = trio.current_time()
        await muxer.event_closed.wait()
        assert trio.current_time() - began <= (limits.STREAM_WRITE_SECONDS + limits.CLOSE_SECONDS)


@pytest.mark.parametrize("vouched", [False, True])
async def test_a_stranger_sends_no_more_than_its_rate_and_an_admitted_peer_what_it_likes(
    vouched: bool,
) -> None:
    async with stranger() as other:
        other.muxer.connection = connection(vouched)
        began = trio.current_time()
        for number in range(1, 65, 2):  # 32 streams of a quarter of a window: 2 MiB
            await other.send(data(number, bytes(WINDOW_BYTES // 4), SYN))
        await other.send(frame(PING, SYN, 0, 7))
        while not any(kind == PING for kind, *_ in other.answers):  # noqa: ASYNC110
            await trio.sleep(0.01)
        took = trio.current_time() - began
        beyond = 32 * (WINDOW_BYTES // 4) - yamux.STRANGER_BYTES_BURST
        least = 0 if vouched else beyond / yamux.STRANGER_BYTES_PER_SECOND
        assert least <= took <= least + 2
