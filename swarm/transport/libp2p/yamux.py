"""Yamux: many streams on one connection, with limits on the memory that they hold.

https://github.com/hashicorp/yamux/blob/master/spec.md, with go-libp2p's initial window of 256 KiB.
The implementation in libp2p 0.8.1 only logs an overrun window and buffers on, accepts any number of
streams, polls every 10 ms while a window is empty, and cannot be given to libp2p's upgrader.

Four limits bound memory:

- a window per stream: a stream that overruns it is reset;
- `MUXER_STREAMS_MAX` streams per connection: more are reset;
- `MUXER_UNREAD_BYTES_MAX` per connection: beyond it the fullest stream is reset;
- `UNREAD_BYTES_MAX` over all connections: beyond it too a fullest stream is reset.

A connection is closed after `MUXER_OVERRUNS_MAX` such resets of its streams, a stranger's also for
streams beyond their number, and when it breaks the protocol.

Small frames are read at a rate, those that open streams at a lower one, from each connection and
from all strangers of one network. Beyond it nothing is read from them: a refusal would cost as much
as the stream, and they would open the next one at once."""

import contextlib
import itertools
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from libp2p.abc import IMuxedConn, IMuxedStream
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)

from swarm.transport import limits
from swarm.transport.libp2p.guard import BROKEN
from swarm.transport.rates import TokenBucket, TokenBuckets
from swarm.world.tasks import held

MUXER_STREAMS_MAX = 256
"""Streams that the other side of a connection may have open: a role uses ten, our protocols allow
64 together, and the circuits of a relay come on top."""

MUXER_UNREAD_BYTES_MAX = 16 << 20
"""Unread bytes of one connection: the windows of the 64 streams that our protocols allow a peer."""

UNREAD_BYTES_MAX = 64 << 20

MUXER_OVERRUNS_MAX = 8
"""Streams reset for the bytes they held, after which their connection is closed."""

MUXER_FRAMES_PER_SECOND = 2000.0
"""Small frames read from one connection on average, at about 40 µs of computing each."""

MUXER_FRAMES_BURST = 10_000.0
"""Small frames read from one connection at once."""

MUXER_FRAMES_PER_STREAM = 10
"""Small frames that opening a stream counts as: at most 200 streams a second."""

MUXER_FRAMES_PER_PING = 20
"""Small frames that a ping counts as; one ping in fifteen seconds is usual."""

MUXER_FRAME_FREE_BYTES = 256
"""A frame with at least this much data is not counted: its bytes slow its sender."""

FRAMES_PER_TURN = 16
"""Frames handled until other tasks have their turn."""

STRANGERS_FRAMES_PER_SECOND = 1000.0
"""Small frames, counted as above, read on average from all strangers of a /24 (IPv6: /48)."""

STRANGERS_FRAMES_BURST = 20_000.0
"""Those read at once: a hundred peers of one network that join send some 150 each."""

NETWORKS_MAX = 4096
"""Networks whose frames are counted; the least recent is forgotten."""

STRANGER_BYTES_PER_SECOND = 512.0 * 1024
"""Bytes read on average from an inbound connection whose peer is neither trusted nor admitted.
Decrypting costs a processor second per 180 MB; a newcomer has to send a few kilobytes."""

STRANGER_BYTES_BURST = 512.0 * 1024
"""Bytes read from such a connection at once."""

PROTOCOL = "/yamux/1.0.0"

_HEAD = struct.Struct("!BBHII")
"""The head of a frame: version, kind, flags, stream, length."""

DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8

WINDOW_BYTES = 256 * 1024
"""Bytes that either side may send on a new stream, as the specification says."""

_WINDOW_BYTES_MAX = (1 << 32) - 1

_FRAME_BYTES_MAX = 65535 - 16 - _HEAD.size
"""Data bytes in a frame that this side sends: with its head the frame fills one noise message."""


class YamuxError(Exception):
    """The other side broke the protocol. The message says how."""


class Shared:
    """What all connections of a host share: the room for unread bytes, and networks' rates."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.muxers: dict[Yamux, None] = {}
        self.frames = TokenBuckets(
            STRANGERS_FRAMES_PER_SECOND, STRANGERS_FRAMES_BURST, NETWORKS_MAX
        )

    def relieve(self) -> None:
        """Drop the fullest stream of the fullest connection; strangers' connections first."""
        full = (muxer for muxer in self.muxers if muxer.unread_bytes)
        max(full, key=lambda muxer: (not muxer.vouched, muxer.unread_bytes)).drop_fullest()


class YamuxStream(IMuxedStream):  # type: ignore[misc]
    """One stream; any number of tasks may read and write."""

    def __init__(self, number: int, muxer: "Yamux") -> None:
        self.number = number
        self.muxed_conn = muxer
        self.closed = False
        self.received = bytearray()
        self._receive_window = WINDOW_BYTES  # what the other side may still send
        self._read_bytes = 0  # read, but not granted again yet
        self._send_window = WINDOW_BYTES
        self._send_ended = False
        self._receive_ended = False
        self._readers = trio.lowlevel.ParkingLot()
        self._writers = trio.lowlevel.ParkingLot()

    # --- this side ---

    async def read(self, n: int | None = -1) -> bytes:
        """Read at least one byte and at most `n`. Raises `MuxedStreamEOF`, `MuxedStreamReset`."""
        if self.received or self.closed or self._receive_ended:  # else it waits below
            await trio.lowlevel.checkpoint()
        # Grant before taking bytes, not after, so that a cancelled read loses none.
        if self._read_bytes * 2 >= WINDOW_BYTES and not self._receive_ended and not self.closed:
            granted, self._read_bytes = self._read_bytes, 0
            self._receive_window += granted
            await self.muxed_conn.send(WINDOW_UPDATE, 0, self.number, granted)
        while not self.received:
            if self.closed:
                raise MuxedStreamReset("the stream was reset")
            if self._receive_ended:
                raise MuxedStreamEOF("the other side has ended the stream")
            await self._readers.park()
        size = len(self.received) if n is None or n < 0 else min(n, len(self.received))
        data = bytes(memoryview(self.received)[:size])
        del self.received[:size]
        self.muxed_conn.count(-size)
        self._read_bytes += size
        self._forget_if_over()
        return data

    async def write(self, data: bytes) -> None:
        """Write as window is granted; cancelled half way, it resets the stream, now garbled."""
        view = memoryview(data)
        begun = False
        try:
            while view:
                while not self._send_window and not self.closed and not self._send_ended:
                    await self._writers.park()
                if self.closed:
                    raise MuxedStreamReset("the stream was reset")
                if self._send_ended:
                    raise MuxedStreamClosed("the stream was ended by this side")
                size = min(len(view), self._send_window, _FRAME_BYTES_MAX)
                # Before the await: another writer must not spend the same window.
                self._send_window -= size
                begun = True
                await self.muxed_conn.send(DATA, 0, self.number, size, view[:size])
                view = view[size:]
        except trio.Cancelled:
            if begun:
                with trio.move_on_after(limits.STREAM_WRITE_SECONDS, shield=True):
                    await self.reset()
            raise

    async def close(self) -> None:
        """End this side's half of the stream."""
        if self._send_ended or self.closed:
            return
        self._send_ended = True
        self._writers.unpark_all()
        self._forget_if_over()
        await self.muxed_conn.send(WINDOW_UPDATE, FIN, self.number, 0)

    async def reset(self) -> None:
        """End both halves at once, unless both have ended."""
        if not self.closed and self.number in self.muxed_conn.streams:
            self.drop()
            await self.muxed_conn.send_reset(self.number)

    async def retire(self) -> None:
        """Forget a stream that nobody reads any more if this side has ended it; else reset it."""
        if self._send_ended:
            self.drop()
        else:
            await self.reset()

    # --- what came from the other side ---

    def feed(self, data: bytes) -> bool:
        """Store received data; False if it exceeds the window or came after the end."""
        if self._receive_ended or len(data) > self._receive_window:
            return False
        self._receive_window -= len(data)
        self.received += data
        self.muxed_conn.count(len(data))
        self._readers.unpark_all()
        return True

    def grant(self, size_bytes: int) -> None:
        self._send_window = min(self._send_window + size_bytes, _WINDOW_BYTES_MAX)
        self._writers.unpark_all()

    def end_receiving(self) -> None:
        self._receive_ended = True
        self._readers.unpark_all()
        self._forget_if_over()

    def drop(self) -> None:
        """Forget the stream and its unread bytes; readers and writers get an error."""
        self.closed = True
        self.muxed_conn.count(-len(self.received))
        self.received.clear()
        self.muxed_conn.forget(self)
        self._readers.unpark_all()
        self._writers.unpark_all()

    def _forget_if_over(self) -> None:
        if self._send_ended and self._receive_ended and not self.received:
            self.muxed_conn.forget(self)

    # --- the rest of libp2p's interface ---

    @property
    def is_closed(self) -> bool:
        return self.closed

    def set_deadline(self, ttl: int) -> None:
        raise NotImplementedError("deadlines are trio's")

    def get_remote_address(self) -> Any:
        return self.muxed_conn.get_remote_address()

    async def __aenter__(self) -> "YamuxStream":
        return self


class Yamux(IMuxedConn):  # type: ignore[misc]
    """The streams of one connection, read by `start` until it ends. `overrun(reason)` is called for
    each stream that was reset for holding too much."""

    def __init__(
        self,
        secured_conn: Any,
        peer_id: Any,
        shared: Shared,
        overrun: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.secured_conn = secured_conn
        self.peer_id = peer_id
        self.on_close: Callable[[], Awaitable[Any]] | None = None
        self.connection: Any = None  # the entry in libp2p's connection table, once made
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self.streams: dict[int, YamuxStream] = {}
        self.unread_bytes = 0
        self._shared = shared
        self._overrun = overrun
        self._overruns = 0
        self.expelled = False
        """Whether it was closed for its overruns."""
        self._initiator = bool(secured_conn.is_initiator)
        self._next = 1 if self._initiator else 2
        self._foreign = 0
        self._opened, self._arrivals = trio.open_memory_channel[YamuxStream](MUXER_STREAMS_MAX)
        self._buffer = bytearray()
        self._writing = trio.Lock()
        self._stuck = False
        self._closing = False
        self._reading = trio.CancelScope()
        self._nursery: trio.Nursery
        self._pong = trio.Event()
        self._frames = TokenBucket(MUXER_FRAMES_PER_SECOND, MUXER_FRAMES_BURST)
        self._bytes = TokenBucket(STRANGER_BYTES_PER_SECOND, STRANGER_BYTES_BURST)

    # --- life ---

    async def start(self) -> None:
        """Read frames until the connection ends. Raises `YamuxError` for a broken protocol."""
        broken: YamuxError | None = None
        try:
            async with trio.open_nursery() as self._nursery:
                self._shared.muxers[self] = None
                self.event_started.set()
                try:
                    with self._reading, contextlib.suppress(*BROKEN):
                        await self._read_frames()
                except YamuxError as error:
                    broken = error
                finally:
                    # What it holds counts against all connections, and none of it is found from now
                    # on (`Shared.relieve`). The last writes below may take seconds.
                    del self._shared.muxers[self]
                    self._drop_streams()
                self._nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self.close()
        if broken is not None:
            raise broken

    async def close(self) -> None:
        """Send GO_AWAY, drop all streams and close. Only the first call does anything."""
        if self._closing:
            return
        self._closing = True
        # Behind half a frame GO_AWAY would be read as that frame's data, and whoever is writing it
        # may hold the lock until the deadline of a write.
        if not self._stuck and not self._writing.locked():
            with contextlib.suppress(*BROKEN), trio.move_on_after(limits.CLOSE_SECONDS):
                await self.secured_conn.write(_HEAD.pack(0, GO_AWAY, 0, 0, 0))
        self._drop_streams()
        self._opened.close()
        self._reading.cancel()
        with contextlib.suppress(*BROKEN):
            await self.secured_conn.close()
        self.event_closed.set()
        if self.on_close is not None:
            await self.on_close()

    def _drop_streams(self) -> None:
        for stream in list(self.streams.values()):
            stream.drop()

    async def ping(self) -> None:
        """Send a ping and wait for its answer."""
        pong = self._pong = trio.Event()
        await self.send(PING, SYN, 0, 0)
        await pong.wait()

    # --- streams ---

    async def open_stream(self) -> YamuxStream:
        if self._closing:
            raise MuxedConnUnavailable("the connection is closed")
        stream = YamuxStream(self._next, self)
        self._next += 2
        self.streams[stream.number] = stream
        try:
            await self.send(WINDOW_UPDATE, SYN, stream.number, 0)
        except BaseException:
            stream.drop()
            raise
        return stream

    async def accept_stream(self) -> YamuxStream:
        """Wait for the next stream that the other side opens. Raises `MuxedConnUnavailable`."""
        async for stream in self._arrivals:
            if not stream.closed:
                return stream
        raise MuxedConnUnavailable("the connection is closed")

    def forget(self, stream: YamuxStream) -> None:
        if self.streams.pop(stream.number, None) is not None and self._is_foreign(stream.number):
            self._foreign -= 1

    def count(self, size_bytes: int) -> None:
        self.unread_bytes += size_bytes
        self._shared.size_bytes += size_bytes

    def drop_fullest(self) -> None:
        """Reset the fullest stream; a task tells the other side, as another's reader may call."""
        stream = max(self.streams.values(), key=lambda stream: len(stream.received))
        self._overran(f"it held {len(stream.received)} unread bytes when there was no more room")
        stream.drop()
        self._nursery.start_soon(self.send_reset, stream.number)

    async def send_reset(self, number: int) -> None:
        with contextlib.suppress(*BROKEN):
            await self.send(WINDOW_UPDATE, RST, number, 0)

    def _overran(self, reason: str) -> None:
        self._overruns += 1
        self._overrun(reason)
        if self._overruns == MUXER_OVERRUNS_MAX:
            self.expelled = True
            self._reading.cancel()

    # --- frames ---

    async def send(
        self, kind: int, flags: int, number: int, length: int, data: bytes | memoryview = b""
    ) -> None:
        """Write one complete frame, or end the connection: half a frame garbles every stream."""
        async with held(self._writing):
            if self._closing:
                raise MuxedStreamError("the connection is closed")
            with trio.move_on_after(limits.STREAM_WRITE_SECONDS, shield=True):
                await self.secured_conn.write(_HEAD.pack(0, kind, flags, number, length) + data)
                return
        self._stuck = True
        self._reading.cancel()
        raise MuxedStreamError(f"nothing could be sent for {limits.STREAM_WRITE_SECONDS:g} s")

    async def _read_frames(self) -> None:
        for count in itertools.count():
            if count % FRAMES_PER_TURN == 0:
                await trio.lowlevel.checkpoint()  # a full buffer must not starve other tasks
            while len(self._buffer) < _HEAD.size:
                self._buffer += await self.secured_conn.read()
            version, kind, flags, number, length = _HEAD.unpack_from(self._buffer)
            del self._buffer[: _HEAD.size]
            if version or kind > GO_AWAY:
                raise YamuxError(f"a frame of version {version} and kind {kind}")
            if kind == GO_AWAY:
                return
            if kind == PING:
                await self._on_ping(flags, length)
                continue
            if number == 0:
                raise YamuxError("stream 0 is not a stream")
            # No window ever exceeds the first one: only bytes that were read are granted again.
            if kind == DATA and length > WINDOW_BYTES:
                raise YamuxError(f"a frame of {length} bytes, more than any window")
            # Paid for before it is acted upon; SYN, FIN and RST come in such frames too.
            if kind == WINDOW_UPDATE or length < MUXER_FRAME_FREE_BYTES:
                await self._count_frames(1)
            if flags & SYN:
                await self._on_open(number, flags)
            if kind == DATA:
                await self._on_data(number, length)
            # Looked up only now: the data may have been too much, or this side ended the stream
            # while it arrived.
            stream = self.streams.get(number)
            if stream is None:
                continue
            if kind == WINDOW_UPDATE:
                stream.grant(length)
            if flags & RST:
                stream.drop()
            elif flags & FIN:
                stream.end_receiving()

    async def _count_frames(self, count: int) -> None:
        await self._frames.spend(count)
        if self.is_strangers and not self.connection.needed:
            await self._shared.frames.of(self.connection.origin.range).spend(count)

    async def _on_data(self, number: int, left: int) -> None:
        """Pass a frame's data on as it arrives, so that at most one noise message is buffered."""
        while left:
            if not self._buffer:
                self._buffer += await self.secured_conn.read()
            data = bytes(memoryview(self._buffer)[:left])
            del self._buffer[: len(data)]
            left -= len(data)
            if self.is_strangers:
                await self._bytes.spend(len(data))
            # Data of a stream that is gone is read all the same, or the next head would be lost in
            # it. The other side had not heard of the reset yet, so it is no fault.
            stream = self.streams.get(number)
            if stream is not None and not stream.feed(data):
                self._overran("more came than its window allows")
                await stream.reset()
            # The own bound first: a connection that hoards must not cost another one its stream.
            if self.unread_bytes > MUXER_UNREAD_BYTES_MAX:
                self.drop_fullest()
            elif self._shared.size_bytes > UNREAD_BYTES_MAX:
                self._shared.relieve()

    async def _on_open(self, number: int, flags: int) -> None:
        if not self._is_foreign(number):
            raise YamuxError(f"stream {number} is not the other side's to open")
        if number in self.streams:
            raise YamuxError(f"stream {number} is open already")
        await self._count_frames(MUXER_FRAMES_PER_STREAM)
        if flags & RST:
            return
        stream = YamuxStream(number, self)
        if self._foreign < MUXER_STREAMS_MAX:
            # The queue may be full of streams that were reset before anyone accepted them.
            with contextlib.suppress(trio.WouldBlock):
                self._opened.send_nowait(stream)
                self.streams[number] = stream
                self._foreign += 1
                await self.send(WINDOW_UPDATE, ACK, number, 0)
                return
        elif self.is_strangers:
            self._overran(f"it opened more than {MUXER_STREAMS_MAX} streams at once")
        await self.send_reset(number)

    async def _on_ping(self, flags: int, value: int) -> None:
        await self._count_frames(MUXER_FRAMES_PER_PING)
        if flags & SYN:
            await self.send(PING, ACK, 0, value)
        else:
            self._pong.set()

    def _is_foreign(self, number: int) -> bool:
        return bool(number % 2) != self._initiator

    # --- the rest of libp2p's interface ---

    @property
    def vouched(self) -> bool:
        """Whether its peer is trusted or admitted."""
        return self.connection is not None and bool(self.connection.vouched)

    @property
    def is_strangers(self) -> bool:
        """Whether a peer opened it that is neither trusted nor admitted."""
        return not self._initiator and self.connection is not None and not self.vouched

    @property
    def is_initiator(self) -> bool:
        return self._initiator

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and not self._closing

    @property
    def is_closed(self) -> bool:
        return self.event_closed.is_set()

    def get_transport_addresses(self) -> Any:
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> Any:
        return self.secured_conn.get_connection_type()

    def get_remote_address(self) -> Any:
        return self.secured_conn.get_remote_address()
