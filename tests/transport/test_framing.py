"""Framing over hostile bytes."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarm.transport import StreamError, limits
from swarm.transport.framing import (
    FramedStream,
    FrameError,
    decode_varint,
    encode_frame,
    encode_varint,
    take_frame,
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


def test_an_empty_frame_is_refused() -> None:
    with pytest.raises(FrameError, match="empty"):
        take_frame(bytearray(b"\x00\x01x"), 100)


payloads = st.lists(st.binary(min_size=1, max_size=300), max_size=12)


@given(payloads, st.lists(st.integers(1, 50), max_size=200))
def test_frames_survive_any_fragmentation(frames: list[bytes], cuts: list[int]) -> None:
    wire = b"".join(map(encode_frame, frames))
    buffer = bytearray()
    got: list[bytes] = []
    position = 0
    for cut in [*cuts, len(wire)]:
        buffer += wire[position : position + cut]
        position += cut
        while (frame := take_frame(buffer, 300)) is not None:
            got.append(frame)
    assert got == frames
    assert not buffer


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (b"\x80\x00", "minimal"),
        (encode_varint(limits.FRAME_BYTES_MAX + 1), "at most"),  # by its head alone
    ],
)
async def test_a_violation_resets_the_stream(wire: bytes, reason: str) -> None:
    carrier = Bytes()
    stream = FramedStream(carrier, peer=PEER, protocol="/t")
    carrier.send_in.send_nowait(wire)
    for _ in range(2):
        with pytest.raises(StreamError, match=reason):
            await stream.receive()
    with pytest.raises(StreamError, match=reason):
        await stream.send(b"x")
    assert carrier.was_reset
    assert not stream.held_bytes


@pytest.mark.parametrize(("tail", "clean"), [(b"", True), (b"\x05ab", False)])
async def test_a_stream_ends_cleanly_but_not_inside_a_frame(tail: bytes, clean: bool) -> None:
    carrier = Bytes()
    stream = FramedStream(carrier, peer=PEER, protocol="/t")
    carrier.send_in.send_nowait(b"\x03abc" + tail)
    carrier.send_in.close()
    assert await stream.receive() == b"abc"
    if clean:
        assert await stream.receive() is None
        await stream.end()
        await stream.reset()  # of what is over
    else:
        with pytest.raises(StreamError, match="within a frame"):
            await stream.receive()
    assert carrier.was_reset is not clean


async def test_a_cancelled_receive_loses_nothing() -> None:
    carrier = Bytes()
    stream = FramedStream(carrier, peer=PEER, protocol="/t")
    for part in (b"\x04ke", b"pt"):
        with trio.move_on_after(1):
            await stream.receive()
        carrier.send_in.send_nowait(part)
    with trio.CancelScope() as scope:
        scope.cancel()
        await stream.receive()
    assert await stream.receive() == b"kept"
