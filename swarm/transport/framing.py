"""Division of a byte stream into frames: `varint(length) payload`, as kad-dht has it.

Varints are unsigned LEB128, minimal, at most four bytes; no frame is empty. A side ends the stream
by ending its bytes after a whole frame; bytes that end otherwise were cut off. How much a sender
may be ahead of the reader is the carrier's affair (yamux: a window of 256 KiB): bytes are read when
a frame is wanted."""

from collections.abc import Callable
from typing import Protocol

import trio

from swarm.transport import StreamError, limits
from swarm.wire.identity import PeerId
from swarm.world.tasks import held

VARINT_BYTES_MAX = 4
"""Enough for lengths below 2^28; every limit on a frame is far below that."""


class ByteStream(Protocol):
    """The carrier of a framed stream: ordered bytes both ways. Methods raise `StreamError`."""

    async def read(self) -> bytes:
        """Read some bytes; b"" at the end of what the other side wrote."""

    async def write(self, data: bytes) -> None:
        """Write all of `data`, or raise; a write that is cancelled half way breaks the stream."""

    async def close_write(self) -> None: ...

    async def reset(self) -> None:
        """Never raises."""


class FrameError(ValueError):
    """Bytes that are not a frame, or a frame larger than its limit."""


def encode_varint(value: int) -> bytes:
    """Encode a number as unsigned LEB128; `ValueError` if it takes more than four bytes."""
    if not 0 <= value < 1 << (7 * VARINT_BYTES_MAX):
        raise ValueError(f"{value} does not fit a varint of {VARINT_BYTES_MAX} bytes")
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varint(buffer: bytes | bytearray, start: int) -> tuple[int, int] | None:
    """(value, position after it) of a varint; None: more bytes are needed. Raises `FrameError`."""
    value = 0
    for index in range(VARINT_BYTES_MAX):
        if start + index >= len(buffer):
            return None
        byte = buffer[start + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if byte == 0 and index > 0:
                raise FrameError("a varint is not minimal")
            return value, start + index + 1
    raise FrameError(f"a varint is longer than {VARINT_BYTES_MAX} bytes")


def encode_frame(payload: bytes) -> bytes:
    return encode_varint(len(payload)) + payload


def take_frame(buffer: bytearray, frame_bytes_max: int) -> bytes | None:
    """Take the first frame out of received bytes; None if more are needed. Raises `FrameError`."""
    head = decode_varint(buffer, 0)
    if head is None:
        return None
    length, start = head
    if not length:  # each costs as much as a full one, and its sender a single byte
        raise FrameError("a frame is empty")
    if length > frame_bytes_max:
        raise FrameError(f"a frame of {length} bytes, at most {frame_bytes_max} allowed")
    if start + length > len(buffer):
        return None
    frame = bytes(memoryview(buffer)[start : start + length])
    del buffer[: start + length]
    return frame


class FramedStream:
    """`swarm.transport.Stream` over any `ByteStream`. Any number of tasks may send, one receives.

    `on_held` is called with each change of `held_bytes`, in bytes."""

    def __init__(
        self,
        carrier: ByteStream,
        *,
        peer: PeerId,
        protocol: str,
        frame_bytes_max: int = limits.FRAME_BYTES_MAX,
        on_held: "Callable[[FramedStream, int], None]" = lambda stream, change_bytes: None,
    ) -> None:
        self.peer = peer
        self.protocol = protocol
        self._carrier = carrier
        self._frame_bytes_max = frame_bytes_max
        self._on_held = on_held
        self._buffer = bytearray()
        self.held_bytes = 0
        """Bytes read from the carrier that `receive` has not returned yet."""
        self._sending = trio.Lock()  # frames of several senders do not mix
        self._local_ended = False
        self._remote_ended = False
        self._failure: str | None = None

    # --- the Stream interface ---

    async def send(self, frame: bytes) -> None:
        if not frame:
            raise ValueError("a frame is never empty")
        async with held(self._sending):
            self._check_writable()
            try:
                await self._carrier.write(encode_frame(frame))
            except StreamError as error:
                raise self._broken(error) from error

    async def receive(self) -> bytes | None:
        if self._buffer or self._remote_ended:  # else it waits for the carrier
            await trio.lowlevel.checkpoint()
        try:
            while not self._remote_ended:
                if self._failure is not None:
                    raise self._error(self._failure)
                frame = take_frame(self._buffer, self._frame_bytes_max)
                if frame is None:
                    await self._read()
                else:
                    self._count_held()
                    return frame
        except FrameError as error:
            await self._reset(f"broke the framing: {error}")
            raise self._error(f"broke the framing: {error}") from error
        return None

    async def end(self) -> None:
        async with self._sending:
            if not self._local_ended:
                self._check_writable()
                self._local_ended = True
                try:
                    await self._carrier.close_write()
                except StreamError as error:
                    raise self._broken(error) from error

    async def reset(self) -> None:
        if not (self._local_ended and self._remote_ended):
            await self._reset("reset by this side")

    # --- the transport's side ---

    def drop(self, reason: str) -> None:
        """Discard what is held, and fail the stream, which the transport then resets."""
        self._failure = self._failure or reason
        self._buffer.clear()
        self._count_held()

    # --- inside ---

    async def _read(self) -> None:
        try:
            data = await self._carrier.read()
            if not data and self._buffer:
                raise StreamError("broke off within a frame")
        except StreamError as error:
            failure = self._broken(error)
            await self._reset(str(error))  # else libp2p keeps its entry of a broken stream
            raise failure from error
        if self._failure is None:  # not dropped meanwhile
            self._buffer += data
            self._remote_ended = not data
            self._count_held()

    def _count_held(self) -> None:
        change, self.held_bytes = len(self._buffer) - self.held_bytes, len(self._buffer)
        if change:
            self._on_held(self, change)

    async def _reset(self, reason: str) -> None:
        self.drop(reason)
        await self._carrier.reset()

    def _check_writable(self) -> None:
        if self._failure is not None:
            raise self._error(self._failure)
        if self._local_ended:
            raise ValueError("this side has said END already")

    def _broken(self, error: StreamError) -> StreamError:
        """Note that the carrier broke; the first reason is the one to raise."""
        self._failure = self._failure or str(error)
        return self._error(self._failure)

    def _error(self, reason: str) -> StreamError:
        return StreamError(f"stream {self.protocol} with {self.peer}: {reason}")
