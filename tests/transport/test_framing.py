"""Framing over hostile bytes, and credit between two ends in memory."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from swarm.transport import Framing, StreamError, limits
from swarm.transport.framing import (
    END_FRAME,
    Decoder,
    FramedStream,
    FrameError,
    decode_varint,
    encode_credit,
    encode_data,
    encode_varint,
)
from swarm.wire.identity import PeerId

PEER = PeerId("12D3KooWtest")


class Bytes:
    """One end of an in-memory byte stream; the test itself plays the other side."""

    def __init__(self) -> None:
        self.send_in, self._incoming = trio.open_memory_channel[bytes](1000)
        self.written: list[bytes] = []
        self.was_reset = False
        self.write_closed = False

    async def read(self) -> bytes:
        try:
            return await self._incoming.receive()
        except trio.EndOfChannel:
            return b""

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.written.append(data)

    async def close_write(self) -> None:
        self.write_closed = True

    async def reset(self) -> None:
        self.was_reset = True


@given(st.integers(0, (1 << 28) - 1), st.binary(max_size=8))
def test_varint_round_trip(value: int, rest: bytes) -> None:
    encoded = encode_varint(value)
    assert decode_varint(encoded + rest, 0) == (value, len(encoded))
    assert all(decode_varint(encoded[:cut], 0) is None for cut in range(len(encoded)))


def test_varint_refuses_what_is_too_long_or_padded() -> None:
    with pytest.raises(FrameError, match="longer"):
        decode_varint(b"\xff\xff\xff\xff\x01", 0)
    with pytest.raises(FrameError, match="minimal"):
        decode_varint(b"\x80\x00", 0)
    with pytest.raises(ValueError, match="fit"):
        encode_varint(1 << 28)


payloads = st.lists(st.binary(min_size=1, max_size=300), max_size=12)


@given(st.sampled_from(Framing), payloads, st.lists(st.integers(1, 50), max_size=200))
def test_frames_survive_any_fragmentation(
    framing: Framing, frames: list[bytes], cuts: list[int]
) -> None:
    wire = b"".join(encode_data(framing, frame) for frame in frames)
    decoder = Decoder(framing, 300)
    got: list[bytes] = []
    position = 0
    for cut in [*cuts, len(wire)]:
        got += [payload for _, payload, _ in decoder.feed(wire[position : position + cut])]
        position += cut
    got += [payload for _, payload, _ in decoder.feed(wire[position:])]
    assert got == frames
    assert not decoder.partial_bytes


def test_big_frames_are_refused_by_their_head_alone() -> None:
    decoder = Decoder(Framing.SWARM, 100)
    with pytest.raises(FrameError, match="101 bytes"):
        decoder.feed(b"\x00" + encode_varint(101))


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (b"\x07", "unknown"),
        (b"\x00\x00", "empty"),
        (END_FRAME + encode_data(Framing.SWARM, b"x"), "after END"),
        (encode_credit(1), "more credit"),
        (b"\x00" + encode_varint(1 << 21), "at most"),
    ],
)
async def test_a_violation_resets_the_stream(wire: bytes, reason: str) -> None:
    carrier = Bytes()
    stream = FramedStream(carrier, peer=PEER, protocol="/t")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.pump)
        carrier.send_in.send_nowait(wire)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(StreamError, match=reason):
            await stream.send(b"x")
    assert carrier.was_reset


async def test_an_end_without_end_is_a_reset_and_comes_after_what_arrived() -> None:
    carrier = Bytes()
    stream = FramedStream(carrier, peer=PEER, protocol="/t")
    carrier.send_in.send_nowait(encode_data(Framing.SWARM, b"last"))
    carrier.send_in.close()
    await stream.pump()
    assert await stream.receive() == b"last"
    with pytest.raises(StreamError, match="without END"):
        await stream.receive()


async def test_delimited_ends_cleanly_but_not_inside_a_frame() -> None:
    for tail, clean in ((b"", True), (b"\x05ab", False)):
        carrier = Bytes()
        stream = FramedStream(carrier, peer=PEER, protocol="/t", framing=Framing.DELIMITED)
        carrier.send_in.send_nowait(b"\x03abc" + tail)
        carrier.send_in.close()
        await stream.pump()
        assert await stream.receive() == b"abc"
        if clean:
            assert await stream.receive() is None
        else:
            with pytest.raises(StreamError, match="without END"):
                await stream.receive()


async def test_sending_beyond_the_credit_is_a_reset() -> None:
    carrier = Bytes()
    stream = FramedStream(carrier, peer=PEER, protocol="/t")
    cost = 1000 + limits.FRAME_COST_BYTES
    allowed = -(-limits.STREAM_CREDIT_BYTES // cost)  # the last one may overdraw
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.pump)
        for _ in range(allowed):
            carrier.send_in.send_nowait(encode_data(Framing.SWARM, b"x" * 1000))
        await trio.testing.wait_all_tasks_blocked()
        assert not carrier.was_reset
        carrier.send_in.send_nowait(encode_data(Framing.SWARM, b"x"))
        await trio.testing.wait_all_tasks_blocked()
        assert carrier.was_reset


async def test_a_sender_without_credit_waits_and_gives_up_at_its_deadline() -> None:
    carrier = Bytes()
    stream = FramedStream(carrier, peer=PEER, protocol="/t")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.pump)
        await stream.send(b"x" * limits.STREAM_CREDIT_BYTES)
        began = trio.current_time()
        with pytest.raises(StreamError, match="read nothing"):
            await stream.send(b"y")
        assert trio.current_time() - began == limits.STREAM_SEND_DEADLINE_SECONDS
        assert carrier.was_reset


async def test_credit_flows_both_ways_while_both_sides_are_sending() -> None:
    """Each side has used its credit and waits; both read. Nobody may deadlock."""
    a, b = Bytes(), Bytes()

    async def wire(source: Bytes, target: Bytes) -> None:
        position = 0
        while True:
            while position < len(source.written):
                target.send_in.send_nowait(source.written[position])
                position += 1
            await trio.sleep(0.001)

    streams = [FramedStream(x, peer=PEER, protocol="/t") for x in (a, b)]
    frames = [random.Random(7).randbytes(5000) for _ in range(300)]

    async def send(stream: FramedStream) -> None:
        for frame in frames:
            await stream.send(frame)
        await stream.end()

    async def receive(stream: FramedStream) -> None:
        got = []
        while (frame := await stream.receive()) is not None:
            got.append(frame)
        assert got == frames

    async with trio.open_nursery() as background:
        background.start_soon(wire, a, b)
        background.start_soon(wire, b, a)
        for stream in streams:
            background.start_soon(stream.pump)
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(send, stream)
                nursery.start_soon(receive, stream)
        assert a.write_closed
        assert b.write_closed
        background.cancel_scope.cancel()


async def test_a_cancelled_receive_loses_nothing() -> None:
    carrier = Bytes()
    stream = FramedStream(carrier, peer=PEER, protocol="/t")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.pump)
        with trio.move_on_after(1):
            await stream.receive()
        carrier.send_in.send_nowait(encode_data(Framing.SWARM, b"kept"))
        await trio.testing.wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.receive()
        assert await stream.receive() == b"kept"
        await stream.reset()
