"""One connection of the piece plane: h11 parses its heads, bodies bypass h11."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import h11
import trio

from swarm.transport import Traffic
from swarm.transport.http import limits
from swarm.transport.http.messages import PLAIN_GET, PLAIN_HEAD, PLAIN_HEAD_BYTES_MAX
from swarm.transport.http.pace import Broken, Pace, Uplink

log = logging.getLogger(__name__)

BUFFER_BYTES = 520 * 1024
"""Bytes received before they are hashed and written: a head and a piece of 512 KiB."""

BUFFERS_KEPT = 8
"""Buffers kept for the next bodies: the number of bodies that a fetch first receives at once."""


class Buffers:
    """Reused buffers for bodies: allocating one costs as much as receiving a piece."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    @contextmanager
    def borrowed(self) -> Iterator[memoryview]:
        buffer = self._free.pop() if self._free else bytearray(BUFFER_BYTES)
        try:
            with memoryview(buffer) as view:
                yield view
        finally:
            if len(self._free) < BUFFERS_KEPT:
                self._free.append(buffer)


class Wire:
    """One connection, TCP or TLS over it."""

    def __init__(
        self,
        stream: trio.SocketStream | trio.SSLStream[trio.SocketStream],
        traffic: Traffic,
        buffers: Buffers,
    ) -> None:
        self.stream = stream
        self.socket = (
            stream.socket
            if isinstance(stream, trio.SocketStream)
            else stream.transport_stream.socket
        )
        # A second object for the same socket: trio's own calls cost more than moving 100 KB.
        self._raw = socket.socket(fileno=self.socket.fileno())
        self._raw.settimeout(0.0)
        self._traffic = traffic
        self._buffers = buffers
        self._ahead = b""  # received beyond the last head

    @property
    def has_unread(self) -> bool:
        """Whether bytes were received beyond the last head or body."""
        return bool(self._ahead)

    def close(self) -> None:
        self._raw.detach()
        self.socket.close()

    async def send(self, data: bytes, *, more: bool = False) -> None:
        """Send a head or a reason. `more`: a body follows and may share a packet with it."""
        if isinstance(self.stream, trio.SocketStream):
            try:
                data = data[self._raw.send(data, socket.MSG_MORE if more else 0) :]
            except BlockingIOError:
                log.debug("a head waits for its reader")
            except OSError as error:
                raise Broken("closed the connection") from error
            if not data:
                return
        with trio.move_on_after(limits.HEAD_SECONDS):
            try:
                await self.stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise Broken("closed the connection") from error
            return
        raise Broken(f"has read nothing for {limits.HEAD_SECONDS:g} s")

    async def head(
        self, parser: h11.Connection, idle_seconds: float
    ) -> h11.Request | h11.Response | h11.InformationalResponse:
        """Receive the next head; raises `Broken` or `h11.RemoteProtocolError`."""
        began = bool(self._ahead)
        received = len(self._ahead)
        seconds = limits.HEAD_SECONDS if began else idle_seconds
        scope = trio.CancelScope(deadline=trio.current_time() + seconds)
        with scope:
            parser.receive_data(self._ahead) if self._ahead else None
            while True:
                event = parser.next_event()
                if isinstance(event, h11.Request | h11.Response | h11.InformationalResponse):
                    self._ahead = bytes(parser.trailing_data[0])
                    # h11 limits only an incomplete head; the last packet may complete a longer one.
                    if received - len(self._ahead) > limits.HEAD_BYTES_MAX:
                        raise h11.RemoteProtocolError("the head is too long")
                    return event
                if event is not h11.NEED_DATA:
                    raise Broken("closed the connection")
                data = await self._receive_some()
                if not data:
                    raise Broken("closed the connection")
                if not began:
                    began = True
                    scope.deadline = trio.current_time() + limits.HEAD_SECONDS
                received += len(data)
                parser.receive_data(data)
        raise Broken("said nothing in time")

    async def plain_get(self, idle_seconds: float) -> bytes | None:
        """The digest that a peer's plain request asks for; None: another request, which `head` has
        yet to read. Raises `Broken`."""
        await trio.lowlevel.checkpoint()  # give other connections their turn
        if not self._ahead:
            with trio.move_on_after(idle_seconds):
                self._ahead = await self._receive_some()
            if not self._ahead:
                raise Broken("said nothing in time, or closed the connection")
        match = PLAIN_GET.match(self._ahead)
        if match is None:
            return None
        self._ahead = self._ahead[match.end() :]  # requests that came at once with this one
        return bytes.fromhex(match[1].decode("ascii"))

    async def _receive_some(self) -> bytes:
        try:
            if isinstance(self.stream, trio.SocketStream):
                while True:
                    try:
                        return self._raw.recv(limits.HEAD_BYTES_MAX)
                    except BlockingIOError:
                        await trio.lowlevel.wait_readable(self.socket)
            return bytes(await self.stream.receive_some(limits.HEAD_BYTES_MAX))
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise Broken("closed the connection") from error

    async def _receive_into(self, view: memoryview) -> int:
        """Receive some bytes, waiting only if none are ready; 0 at the end. Raises `Broken`."""
        try:
            if isinstance(self.stream, trio.SocketStream):
                while True:
                    try:
                        return self._raw.recv_into(view)
                    except BlockingIOError:
                        await trio.lowlevel.wait_readable(self.socket)
            data = await self.stream.receive_some(len(view))
        except (OSError, trio.BrokenResourceError) as error:
            raise Broken("closed the connection") from error
        view[: len(data)] = data
        return len(data)

    async def plain_blob(self, size_bytes: int, write: Callable[[memoryview], object]) -> int:
        """The size that a peer's plain answer to a GET states, received by `write` if it is
        `size_bytes`; -1: another answer, which `head` has yet to read."""
        if len(self._ahead) > PLAIN_HEAD_BYTES_MAX:
            return -1
        with self._buffers.borrowed() as buffer:
            pace = Pace(size_bytes)
            with pace.scope:
                # Limits how much of the next answer is received with this one.
                wanted = buffer[: PLAIN_HEAD_BYTES_MAX + size_bytes]
                filled = len(self._ahead)
                buffer[:filled] = self._ahead
                self._ahead = b""
                while True:
                    start = bytes(buffer[: min(filled, PLAIN_HEAD_BYTES_MAX)])
                    match = PLAIN_HEAD.match(start)
                    if match is not None:
                        if int(match[1]) == size_bytes:
                            await self._rest(size_bytes, write, buffer, match.end(), filled, pace)
                        return int(match[1])
                    if b"\r\n\r\n" in start or filled >= PLAIN_HEAD_BYTES_MAX:
                        break
                    count = await self._receive_into(wanted[filled:])
                    if not count:
                        break
                    filled += count
                if not filled:
                    raise Broken("closed the connection")
                self._ahead = bytes(buffer[:filled])
                return -1
        raise Broken(pace.complaint())

    async def small_body(self, size_bytes: int) -> bytes:
        """Receive a body that is no blob."""
        body = bytearray()
        await self.body(size_bytes, body.extend)
        self._traffic.received -= size_bytes
        return bytes(body)

    async def body(
        self,
        size_bytes: int,
        write: Callable[[memoryview], object],
        still: Callable[[], bool] = lambda: True,
    ) -> None:
        """Receive exactly `size_bytes` into `write`, as long as `still()` is true."""
        with self._buffers.borrowed() as buffer:
            filled = min(len(self._ahead), size_bytes, len(buffer))
            buffer[:filled] = self._ahead[:filled]
            self._ahead = self._ahead[filled:]
            pace = Pace(size_bytes, still)
            with pace.scope:
                await self._rest(size_bytes, write, buffer, 0, filled, pace)
                return
        raise Broken(pace.complaint())

    async def _rest(
        self,
        size_bytes: int,
        write: Callable[[memoryview], object],
        buffer: memoryview,
        start: int,
        filled: int,
        pace: Pace,
    ) -> None:
        """Receive a body that begins with `buffer[start:filled]`, within `pace.scope`."""
        if filled - start > size_bytes:
            self._ahead = bytes(buffer[start + size_bytes : filled])
            filled = start + size_bytes
        left = size_bytes - (filled - start)
        self._traffic.received += filled - start
        while left:
            pace.done = size_bytes - left
            if filled == len(buffer):
                write(buffer[start:filled])
                start = filled = 0
            count = await self._receive_into(buffer[filled : filled + left])
            if not count:
                raise Broken(f"broke off after {size_bytes - left} bytes")
            pace.moved()
            self._traffic.received += count
            filled += count
            left -= count
        if filled > start:
            write(buffer[start:filled])
        await trio.lowlevel.checkpoint()

    async def send_file(
        self,
        path: str | os.PathLike[str],
        offset: int,
        size_bytes: int,
        uplink: Uplink,
        still: Callable[[], bool] = lambda: True,
    ) -> None:
        """Send while `still()`. Raises `Broken`; `OSError` if the file cannot be opened."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        done = 0
        pace = Pace(size_bytes, still)
        try:
            with pace.scope:
                while done < size_bytes:
                    wanted = min(size_bytes - done, uplink.portion_bytes)
                    await uplink.take(wanted, pace)
                    try:
                        count = os.sendfile(self.socket.fileno(), file, offset + done, wanted)
                    except BlockingIOError:
                        uplink.give_back(wanted)
                        await trio.lowlevel.wait_writable(self.socket)
                        continue
                    except OSError as error:
                        raise Broken(f"broke off after {done} bytes") from error
                    if not count:
                        raise Broken("the file here is shorter than its blob")
                    uplink.give_back(wanted - count)
                    pace.moved()
                    done += count
                    pace.done = done
                    self._traffic.sent += count
                    if done < size_bytes:
                        await trio.lowlevel.checkpoint()
            if pace.scope.cancelled_caught:
                raise Broken(pace.complaint())
        finally:
            os.close(file)
