"""Division of a byte stream into frames, and the credit that bounds what a reader must hold.

`SWARM` framing, one byte of type first:

    00 varint(length) payload    DATA, length ≥ 1
    01                           END: the sender sends no more DATA
    02 varint(bytes)             CREDIT: that many more bytes of DATA may be sent

Varints are unsigned LEB128, minimal, at most four bytes. A DATA frame costs its payload plus
`FRAME_COST_BYTES`. Each side starts with `STREAM_CREDIT_BYTES` of credit and may send while its
credit is above zero, so one frame may overdraw it. A frame that arrives without credit is a
violation and resets the stream. A byte stream that ends without END was cut off: libp2p shows the
sudden death of a peer as a clean end.

`DELIMITED` framing is `varint(length) payload` and a clean end: what kad-dht speaks. It has no
credit, so a stream whose sender is more than `STREAM_CREDIT_BYTES` ahead of the reader is reset.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

import trio

from swarm.transport import Framing, StreamError, limits
from swarm.wire.identity import PeerId

log = logging.getLogger(__name__)

VARINT_BYTES_MAX = 4
"""Enough for lengths below 2^28; every limit on a frame is far below that."""


class ByteStream(Protocol):
    """The carrier of a framed stream: ordered bytes both ways. Methods raise `StreamError`."""

    async def read(self) -> bytes:
        """Read some bytes; b"" at the end of what the other side wrote."""
        ...

    async def write(self, data: bytes) -> None:
        """Write all of `data`, or raise; cancelling never leaves half a write behind."""
        ...

    async def close_write(self) -> None: ...

    async def reset(self) -> None:
        """Never raises."""
        ...


class FrameKind(enum.IntEnum):
    DATA = 0
    END = 1
    CREDIT = 2


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
    """Decode a varint: (value, position after it), or None if more bytes are needed.

    Raises `FrameError`.
    """
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


def encode_data(framing: Framing, payload: bytes) -> bytes:
    """Encode one DATA frame."""
    head = encode_varint(len(payload))
    return head + payload if framing is Framing.DELIMITED else b"\x00" + head + payload


def encode_credit(credit_bytes: int) -> bytes:
    """Encode one CREDIT frame."""
    return b"\x02" + encode_varint(credit_bytes)


END_FRAME = b"\x01"


class Decoder:
    """Turns bytes into frames. Holds at most one unfinished frame of `frame_bytes_max`."""

    def __init__(self, framing: Framing, frame_bytes_max: int) -> None:
        self._framing = framing
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()

    @property
    def partial_bytes(self) -> int:
        """Bytes received of an unfinished frame."""
        return len(self._buffer)

    def clear(self) -> None:
        self._buffer.clear()

    def feed(self, data: bytes) -> list[tuple[FrameKind, bytes, int]]:
        """Frames completed by `data`: (kind, payload of DATA, bytes of CREDIT).

        Raises `FrameError`; the decoder cannot be used afterwards.
        """
        buffer = self._buffer
        buffer += data
        frames: list[tuple[FrameKind, bytes, int]] = []
        position = 0
        try:
            while position < len(buffer):
                parsed = self._parse(position)
                if parsed is None:
                    break
                frame, position = parsed
                frames.append(frame)
        finally:
            del buffer[:position]
        return frames

    def _parse(self, position: int) -> tuple[tuple[FrameKind, bytes, int], int] | None:
        buffer = self._buffer
        kind = FrameKind.DATA
        if self._framing is Framing.SWARM:
            if buffer[position] > FrameKind.CREDIT:
                raise FrameError(f"frame type {buffer[position]} is unknown")
            kind = FrameKind(buffer[position])
            position += 1
            if kind is FrameKind.END:
                return (kind, b"", 0), position
        head = decode_varint(buffer, position)
        if head is None:
            return None
        length, position = head
        if kind is FrameKind.CREDIT:
            return (kind, b"", length), position
        if length > self._frame_bytes_max:
            raise FrameError(f"a frame of {length} bytes, at most {self._frame_bytes_max} allowed")
        if length == 0 and self._framing is Framing.SWARM:
            raise FrameError("an empty frame")
        end = position + length
        if end > len(buffer):
            return None
        return (kind, bytes(memoryview(buffer)[position:end]), 0), end


class FramedStream:
    """`swarm.transport.Stream` over any `ByteStream`.

    `pump` must run in a task of the transport from the start: it always drains the carrier (yamux
    resets a stream whose reader stalls), into a queue that credit bounds. `on_held` is called with
    each change of `held_bytes`, in bytes.
    """

    def __init__(
        self,
        carrier: ByteStream,
        *,
        peer: PeerId,
        protocol: str,
        framing: Framing = Framing.SWARM,
        frame_bytes_max: int = limits.FRAME_BYTES_MAX,
        on_held: Callable[[int], None] = lambda change_bytes: None,
    ) -> None:
        self.peer = peer
        self.protocol = protocol
        self._carrier = carrier
        self._framing = framing
        self._decoder = Decoder(framing, frame_bytes_max)
        self._on_held = on_held
        self.held_bytes = 0
        """Bytes of frames that `receive` has not returned yet, an unfinished frame included."""
        self._queued = 0
        self._queue: deque[bytes] = deque()
        self._changed = trio.Event()
        self._send_lock = trio.Lock()  # one sender at a time waits for credit
        self._write_lock = trio.Lock()  # CREDIT passes while a sender waits
        self._pump_scope = trio.CancelScope()
        self._credit = limits.STREAM_CREDIT_BYTES  # what we may still send
        self._granted = limits.STREAM_CREDIT_BYTES  # what the other side may still send
        self._consumed = 0  # taken by `receive`, not yet granted again
        self._local_ended = False
        self._remote_ended = False
        self._write_closed = False
        self._failure: str | None = None

    # --- the Stream interface ---

    async def send(self, frame: bytes) -> None:
        if not frame:
            raise ValueError("a frame is never empty")
        data = encode_data(self._framing, frame)
        async with self._send_lock:
            self._check_writable()
            if self._framing is Framing.DELIMITED:
                await self._write(data)
            else:
                await self._wait_for_credit()
                await self._write(data, len(frame) + limits.FRAME_COST_BYTES)

    async def receive(self) -> bytes | None:
        await trio.lowlevel.checkpoint()
        # Grant before taking a frame, not after, so that a cancelled `receive` loses none.
        if self._consumed * 2 >= limits.STREAM_CREDIT_BYTES:
            await self._grant()
        while not self._queue:
            if self._remote_ended:
                return None
            if self._failure is not None:
                raise self._error(self._failure)
            await self._changed.wait()
        frame = self._queue.popleft()
        self._consumed += len(frame) + limits.FRAME_COST_BYTES
        self._queued -= len(frame)
        self._count_held()
        return frame

    async def end(self) -> None:
        async with self._send_lock:
            if self._local_ended:
                return
            self._check_writable()
            if self._framing is Framing.SWARM:
                await self._write(END_FRAME)
            self._local_ended = True
        # This side must still send CREDIT while the other side sends, so a SWARM stream closes
        # its carrier only when both sides have sent END.
        if self._framing is Framing.DELIMITED:
            await self._close_write()
        if self._remote_ended:
            await self._finish()

    async def reset(self) -> None:
        if self._failure is None and not self._over:
            self.drop("reset by this side")
            await self._carrier.reset()

    # --- the transport's side ---

    def drop(self, reason: str) -> None:
        """Discard the held frames and fail the stream; `pump` then resets it."""
        self._queue.clear()
        self._queued = 0
        self._decoder.clear()
        self._fail(reason)
        self._count_held()

    def stop_counting(self) -> None:
        """Report no further change of what is held."""
        self._on_held(-self.held_bytes)
        self._on_held = lambda change_bytes: None

    async def pump(self) -> None:
        """Drain the carrier until the stream is over. Never raises `StreamError`."""
        try:
            with self._pump_scope:
                await self._drain()
            if self._pump_scope.cancelled_caught:
                await self._carrier.reset()  # failed, or only the other side's close is missing
        except FrameError as error:
            log.debug("%s on %s broke the framing: %s", self.peer, self.protocol, error)
            self._fail(f"broke the framing: {error}")
            await self._carrier.reset()
        except StreamError as error:
            if not self._over:
                self._fail(str(error))
            await self._carrier.reset()  # else libp2p keeps its entry of a broken stream
        except BaseException:
            self._fail("this peer is shutting down")
            raise

    async def wait_remote_end(self) -> None:
        """Return once the other side has ended or the stream failed."""
        while not self._remote_ended and self._failure is None:
            await self._changed.wait()

    # --- inside ---

    @property
    def _over(self) -> bool:
        return self._local_ended and self._remote_ended

    async def _drain(self) -> None:
        while True:
            data = await self._carrier.read()
            if not data:
                if not self._remote_ended:
                    if self._framing is Framing.SWARM or self._decoder.partial_bytes:
                        raise StreamError("broke off without END")
                    self._remote_ended = True
                    self._wake()
                if self._local_ended:
                    await self._finish()
                return
            for kind, payload, credit in self._decoder.feed(data):
                self._take(kind, payload, credit)
            self._count_held()
            if self._over:
                await self._finish()

    def _take(self, kind: FrameKind, payload: bytes, credit: int) -> None:
        if kind is FrameKind.CREDIT:
            self._credit += credit
            if self._credit > limits.STREAM_CREDIT_BYTES:
                raise FrameError("more credit granted than was used")
        elif self._remote_ended:
            raise FrameError("a frame after END")
        elif kind is FrameKind.END:
            self._remote_ended = True
        else:
            if self._granted <= 0:
                raise FrameError("sent more than it had credit for")
            self._granted -= len(payload) + limits.FRAME_COST_BYTES
            self._queue.append(payload)
            self._queued += len(payload)
        self._wake()

    def _count_held(self) -> None:
        held = self._queued + self._decoder.partial_bytes
        change, self.held_bytes = held - self.held_bytes, held
        if change:
            self._on_held(change)

    async def _grant(self) -> None:
        """Grant credit for the consumed bytes, half a window at a time."""
        async with self._write_lock:
            consumed, self._consumed = self._consumed, 0
            self._granted += consumed
            if self._framing is Framing.DELIMITED or self._remote_ended or self._failure:
                return
            try:
                await self._carrier.write(encode_credit(consumed))
            except StreamError as error:
                self._fail(str(error))  # frames already queued can still be received

    async def _wait_for_credit(self) -> None:
        if self._credit > 0:
            return
        seconds = limits.STREAM_SEND_DEADLINE_SECONDS
        with trio.move_on_after(seconds) as scope:
            while self._credit <= 0:
                await self._changed.wait()
                self._check_writable()
        if scope.cancelled_caught:
            await self.reset()
            raise self._error(f"has read nothing for {seconds:g} s")

    async def _write(self, data: bytes, cost: int = 0) -> None:
        async with self._write_lock:
            self._check_writable()
            self._credit -= cost
            try:
                await self._carrier.write(data)
            except StreamError as error:
                self._fail(str(error))
                raise self._error(str(error)) from error

    async def _close_write(self) -> None:
        async with self._write_lock:
            if self._write_closed or self._failure is not None:
                return
            self._write_closed = True
            try:
                await self._carrier.close_write()
            except StreamError as error:
                log.debug("closing %s with %s: %s", self.protocol, self.peer, error)

    async def _finish(self) -> None:
        """Close after END from both sides; wait a bounded time for the other side's close."""
        await self._close_write()
        self._pump_scope.deadline = min(
            self._pump_scope.deadline, trio.current_time() + limits.STREAM_LINGER_SECONDS
        )

    def _check_writable(self) -> None:
        if self._failure is not None:
            raise self._error(self._failure)
        if self._local_ended:
            raise ValueError("this side has said END already")

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
        self._pump_scope.cancel()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _error(self, reason: str) -> StreamError:
        return StreamError(f"stream {self.protocol} with {self.peer}: {reason}")
