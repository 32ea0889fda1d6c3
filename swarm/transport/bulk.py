"""The bulk plane: blobs named by their BLAKE3-256 hash, over HTTP/1.1.

    GET  /blob/<64 hex digits>   the bytes; HEAD likewise without them
    PUT  /blob/<64 hex digits>   push; `Expect: 100-continue` asks before sending
    GET  /challenge              32 random bytes, good once on this connection
    POST /admission              msgpack [peer id, signature, credential]

A client proves itself once a connection: it signs `PROOF_DOMAIN ‖ server's peer id ‖ challenge`,
so a proof is of no use on another connection or at another server. Whoever proves nothing is
`None` to the `BulkService`. Whether a client is still admitted is asked again each second, during
long answers too, so an eviction or a lease that ran out cuts off at once.

Heads go through h11, each with a fresh parser, except the one request and the one answer that
peers exchange thousands of times, which are recognised whole. Bodies never do: they go out by
sendfile and come in by recv_into, straight into the sink, which hashes them. Mirrors may also be
`https://`; only clients speak it.

A peer without a usable HTTP address is asked the same over a stream, `/swarm/blob/1.0.0`:
`Ask`, then `Answer` and DATA frames (get), or `Answer`, DATA frames from the client and a second
`Answer` (put).
"""

from __future__ import annotations

import functools
import logging
import os
import re
import secrets
import select
import socket
import ssl
import urllib.parse
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

import h11
import msgspec
import trio

from swarm import PROTOCOL_VERSION, defaults
from swarm.errors import DECODE_ERRORS, DiskFullError
from swarm.identity import Identity, PeerId, verify
from swarm.rates import TokenBucket, TokenBuckets
from swarm.transport import (
    Arrived,
    BlobReference,
    BulkService,
    FetchError,
    OpenBlob,
    Refused,
    Stream,
    StreamError,
)
from swarm.transport.base import Traffic
from swarm.world import Disk, Piece, Sink

log = logging.getLogger(__name__)

BLOB_PROTOCOL = f"/swarm/blob/{PROTOCOL_VERSION}.0.0"
PROOF_DOMAIN = b"swarm/1/bulk-proof\x00"
CHALLENGE_BYTES = 32
_PROOF_BYTES_MAX = defaults.ENVELOPE_BYTES_MAX + 1024
_BLOB_PATH = re.compile(rb"/blob/([0-9a-f]{64})")
_PLAIN_GET = re.compile(rb"GET /blob/([0-9a-f]{64}) HTTP/1\.1\r\nhost: [!-~]{1,300}\r\n\r\n")
"""The request of a peer for a piece: no other header has a meaning for us."""
_PLAIN_HEAD = re.compile(
    rb"HTTP/1\.1 200 \r\ncontent-length: (\d{1,15})\r\n"
    rb"content-type: application/octet-stream\r\n\r\n"
)
"""The head of its answer, as `_head` writes it."""
_PLAIN_HEAD_BYTES_MAX = 256


class Proof(msgspec.Struct, array_like=True, frozen=True):
    """The body of `POST /admission`."""

    peer: str
    signature: bytes
    credential: bytes


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """The first frame of a blob stream."""

    push: bool
    digest: bytes
    size_bytes: int
    credential: bytes


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """What the other side says: an HTTP status (100: go on) and a reason."""

    status: int
    reason: str
    size_bytes: int


_encode = msgspec.msgpack.Encoder().encode
_decode_proof = msgspec.msgpack.Decoder(Proof).decode
_decode_ask = msgspec.msgpack.Decoder(Ask).decode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


def proof_message(server: PeerId, challenge: bytes) -> bytes:
    """What a client signs."""
    return PROOF_DOMAIN + server.encode("ascii") + b"\x00" + challenge


class Unreachable(FetchError):
    """No connection to a source could be made: another way to it may work."""


class _Broken(Exception):
    """The other side closed, stalled, or was too slow. Says which."""


_buffers: list[bytearray] = []
"""For bodies, used again and again: making one costs as much as receiving a piece."""


@contextmanager
def _buffer() -> Iterator[memoryview]:
    buffer = _buffers.pop() if _buffers else bytearray(defaults.BULK_BUFFER_BYTES)
    try:
        with memoryview(buffer) as view:
            yield view
    finally:
        if len(_buffers) < defaults.FETCH_PARALLEL:
            _buffers.append(buffer)


class _Wire:
    """One connection, TCP or TLS over it: heads by h11, bodies around it."""

    def __init__(
        self, stream: trio.SocketStream | trio.SSLStream[trio.SocketStream], traffic: Traffic
    ) -> None:
        self.stream = stream
        self.socket = (
            stream.socket
            if isinstance(stream, trio.SocketStream)
            else stream.transport_stream.socket
        )
        # The same socket once more: trio's own calls cost more than moving 100 KB.
        self._raw = socket.socket(fileno=self.socket.fileno())
        self._raw.settimeout(0.0)
        self._traffic = traffic
        self._ahead = b""  # received beyond the last head
        self.unanswered = 0
        """Requests whose answers have not been received whole."""
        self.ends = False
        """The server closes it, or nobody knows where its next answer would begin."""

    @property
    def can_be_kept(self) -> bool:
        """Whether another request may be sent: nothing of the last ones is under way."""
        return not (self.unanswered or self.ends or self._ahead)

    def close(self) -> None:
        self._raw.detach()
        self.socket.close()

    async def send(self, data: bytes, *, more: bool = False) -> None:
        """Small things: heads and reasons. `more`: a body follows, to travel in one packet."""
        if isinstance(self.stream, trio.SocketStream):
            try:
                data = data[self._raw.send(data, socket.MSG_MORE if more else 0) :]
            except BlockingIOError:
                log.debug("a head waits for its reader")
            except OSError as error:
                raise _Broken("closed the connection") from error
            if not data:
                return
        with trio.move_on_after(defaults.BULK_HEAD_SECONDS):
            try:
                await self.stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise _Broken("closed the connection") from error
            return
        raise _Broken(f"has read nothing for {defaults.BULK_HEAD_SECONDS:g} s")

    async def head(
        self, parser: h11.Connection, idle_seconds: float
    ) -> h11.Request | h11.Response | h11.InformationalResponse:
        """The next head; raises `_Broken` or `h11.RemoteProtocolError`."""
        began = bool(self._ahead)
        received = len(self._ahead)
        seconds = defaults.BULK_HEAD_SECONDS if began else idle_seconds
        scope = trio.CancelScope(deadline=trio.current_time() + seconds)
        with scope:
            parser.receive_data(self._ahead) if self._ahead else None
            while True:
                event = parser.next_event()
                if isinstance(event, h11.Request | h11.Response | h11.InformationalResponse):
                    self._ahead = bytes(parser.trailing_data[0])
                    # h11 bounds what is not complete yet; the last packet may do both.
                    if received - len(self._ahead) > defaults.BULK_HEAD_BYTES_MAX:
                        raise h11.RemoteProtocolError("the head is too long")
                    return event
                if event is not h11.NEED_DATA:
                    raise _Broken("closed the connection")
                data = await self._receive_some()
                if not data:
                    raise _Broken("closed the connection")
                if not began:
                    began = True
                    scope.deadline = trio.current_time() + defaults.BULK_HEAD_SECONDS
                received += len(data)
                parser.receive_data(data)
        raise _Broken("said nothing in time")

    async def plain_get(self, idle_seconds: float) -> bytes | None:
        """The digest wanted, if the next request is a peer's for a piece and nothing else; if it
        is another (None), `head` has yet to read it. Raises `_Broken`."""
        await trio.lowlevel.checkpoint()  # others have their turn, whatever this client has ready
        if not self._ahead:
            with trio.move_on_after(idle_seconds):
                self._ahead = await self._receive_some()
            if not self._ahead:
                raise _Broken("said nothing in time, or closed the connection")
        match = _PLAIN_GET.match(self._ahead)
        if match is None:
            return None
        self._ahead = self._ahead[match.end() :]  # requests that came at once with this one
        return bytes.fromhex(match[1].decode("ascii"))

    async def _receive_some(self) -> bytes:
        try:
            if isinstance(self.stream, trio.SocketStream):
                while True:
                    try:
                        return self._raw.recv(defaults.BULK_HEAD_BYTES_MAX)
                    except BlockingIOError:
                        await trio.lowlevel.wait_readable(self.socket)
            return bytes(await self.stream.receive_some(defaults.BULK_HEAD_BYTES_MAX))
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise _Broken("closed the connection") from error

    async def _receive_into(self, view: memoryview) -> int:
        """Receive some bytes, waiting only if there are none; 0 at the end. Raises `_Broken`."""
        try:
            if isinstance(self.stream, trio.SocketStream):
                while True:
                    try:
                        return self._raw.recv_into(view)
                    except BlockingIOError:
                        await trio.lowlevel.wait_readable(self.socket)
            data = await self.stream.receive_some(len(view))
        except (OSError, trio.BrokenResourceError) as error:
            raise _Broken("closed the connection") from error
        view[: len(data)] = data
        return len(data)

    async def plain_blob(self, size_bytes: int, write: Callable[[memoryview], object]) -> int:
        """Receive a peer's answer to a GET. The size it states; when that is `size_bytes`, `write`
        was given the body. -1: it is another answer, which `head` has yet to read."""
        if len(self._ahead) > _PLAIN_HEAD_BYTES_MAX:
            return -1
        with _buffer() as buffer:
            pace = _Pace(size_bytes)
            with pace.scope:
                # Little of a next answer is received with this one.
                wanted = buffer[: _PLAIN_HEAD_BYTES_MAX + size_bytes]
                filled = len(self._ahead)
                buffer[:filled] = self._ahead
                self._ahead = b""
                while True:
                    start = bytes(buffer[: min(filled, _PLAIN_HEAD_BYTES_MAX)])
                    match = _PLAIN_HEAD.match(start)
                    if match is not None:
                        if int(match[1]) == size_bytes:
                            await self._rest(size_bytes, write, buffer, match.end(), filled, pace)
                        return int(match[1])
                    if b"\r\n\r\n" in start or filled >= _PLAIN_HEAD_BYTES_MAX:
                        break
                    count = await self._receive_into(wanted[filled:])
                    if not count:
                        break
                    filled += count
                if not filled:
                    raise _Broken("closed the connection")
                self._ahead = bytes(buffer[:filled])
                return -1
        raise _Broken(pace.complaint())

    async def small_body(self, size_bytes: int) -> bytes:
        body = bytearray()
        await self.body(size_bytes, body.extend)
        self._traffic.received -= size_bytes  # that was no blob
        return bytes(body)

    async def body(
        self,
        size_bytes: int,
        write: Callable[[memoryview], object],
        still: Callable[[], bool] = lambda: True,
    ) -> None:
        """Receive exactly `size_bytes` into `write`, as long as `still()`."""
        with _buffer() as buffer:
            filled = min(len(self._ahead), size_bytes, len(buffer))
            buffer[:filled] = self._ahead[:filled]
            self._ahead = self._ahead[filled:]
            pace = _Pace(size_bytes, still)
            with pace.scope:
                await self._rest(size_bytes, write, buffer, 0, filled, pace)
                return
        raise _Broken(pace.complaint())

    async def _rest(
        self,
        size_bytes: int,
        write: Callable[[memoryview], object],
        buffer: memoryview,
        start: int,
        filled: int,
        pace: _Pace,
    ) -> None:
        """Receive what is missing of a body whose first bytes are `buffer[start:filled]`; `write`
        gets it all, in large parts. To be called within `pace.scope`."""
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
                raise _Broken(f"broke off after {size_bytes - left} bytes")
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
        """A range of a file, by sendfile, as long as `still()`; raises `_Broken`, or `OSError` if
        it cannot be opened."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        done = 0
        pace = _Pace(size_bytes, still)
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
                        raise _Broken(f"broke off after {done} bytes") from error
                    if not count:
                        raise _Broken("the file here is shorter than its blob")
                    uplink.give_back(wanted - count)
                    pace.moved()
                    done += count
                    pace.done = done
                    self._traffic.sent += count
                    if done < size_bytes:
                        await trio.lowlevel.checkpoint()
            if pace.scope.cancelled_caught:
                raise _Broken(pace.complaint())
        finally:
            os.close(file)


class _Pace:
    """Deadlines of one body: no stall, not too slow on the whole, and only for whom it is meant.

    The body is moved within `scope`.
    """

    def __init__(self, size_bytes: int, still: Callable[[], bool] = lambda: True) -> None:
        self._began = trio.current_time()
        self._end = (
            self._began
            + defaults.BULK_STALL_SECONDS
            + size_bytes / defaults.BULK_BYTES_PER_SECOND_MIN
        )
        self._still = still
        self._asked = self._began
        self._moved = self._began
        self.done = 0
        """Bytes, for the complaint."""
        self.scope = trio.CancelScope()
        self._set()

    def _set(self) -> None:
        self.scope.deadline = min(self._moved + defaults.BULK_STALL_SECONDS, self._end)

    def moved(self) -> None:
        """Bytes have moved. Raises `_Broken` when the other side has lost its admission."""
        now = trio.current_time()
        if now - self._asked > defaults.BULK_ADMITTED_SECONDS:
            self._asked = now
            if not self._still():
                raise _Broken("is no longer admitted")
        # A deadline costs more to move than to look at: a tenth of the stall is near enough.
        if now - self._moved > defaults.BULK_STALL_SECONDS / 10:
            self._moved = now
            self._set()

    def wait(self, seconds: float) -> None:
        """This side's own limit holds the body up for so long from now: not the other's fault."""
        self._end += seconds
        self._moved += seconds
        self._set()

    def complaint(self) -> str:
        seconds = trio.current_time() - self._began
        return f"stalled or was too slow: {self.done} bytes in {seconds:.1f} s"


class Uplink:
    """What this peer's bulk plane may send altogether; None: as fast as the network takes it."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self._bucket: TokenBucket | None = None
        self.portion_bytes = defaults.BULK_READ_BYTES
        """Sent at a time."""
        if bytes_per_second is not None:
            # A portion is at most 20 ms, so that many connections take turns.
            portion = int(bytes_per_second * defaults.BULK_PORTION_SECONDS)
            self.portion_bytes = max(1500, min(defaults.BULK_READ_BYTES, portion))
            # What was not used in time is lost, but for a little: the system wakes late.
            burst = bytes_per_second * defaults.BULK_UPLINK_BURST_SECONDS
            self._bucket = TokenBucket(bytes_per_second, burst)

    async def take(self, size_bytes: int, pace: _Pace) -> None:
        """Wait for the turn of so many bytes of a body, first come first served."""
        if self._bucket is None:
            return
        now = trio.current_time()
        seconds = self._bucket.debt_seconds(now)
        self._bucket.borrow(size_bytes, now)
        if not seconds:
            return
        pace.wait(seconds)
        try:
            await trio.sleep(seconds)
        except trio.Cancelled:
            self.give_back(size_bytes)
            raise

    def give_back(self, size_bytes: int) -> None:
        """So many bytes were taken and not sent."""
        if self._bucket is not None:
            self._bucket.give_back(size_bytes)


# --- serving ---------------------------------------------------------------------------------


class _Reply(Exception):
    """A status and a line of text ends a request."""

    def __init__(self, status: int, text: str, *, close: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.close = close


class _StreamAdmission(NamedTuple):
    """What was last found about a peer that asks over streams."""

    credential: bytes
    asked_at: float
    admitted: bool


class BulkServer:
    """Answers the HTTP plane for one peer."""

    def __init__(
        self,
        peer_id: PeerId,
        disk: Disk,
        service: Callable[[], BulkService | None],
        traffic: Traffic,
        *,
        uplink: Uplink | None = None,
        pages: Mapping[bytes, bytes] | None = None,
    ) -> None:
        """`uplink`: a limit on what is sent; `pages`: small documents by path, for everybody."""
        self._traffic = traffic
        self._peer_id = peer_id
        self._disk = disk
        self._service = service
        self.uplink = uplink or Uplink()
        self.pages = dict(pages or {})
        self.rates = TokenBuckets(
            defaults.BULK_SMALL_REQUESTS_PER_SECOND,
            defaults.BULK_SMALL_REQUESTS_BURST,
            defaults.BULK_CLIENTS_KNOWN_MAX,
        )
        """Of small requests, by address and by peer."""
        self.by_peer: Counter[PeerId] = Counter()
        """Connections that proved to be a peer's."""
        self._by_host: Counter[str] = Counter()
        self._connections = 0
        self._stream_admissions: dict[PeerId, _StreamAdmission] = {}

    async def serve(self, listeners: list[trio.SocketListener]) -> None:
        """Accept until cancelled."""
        await trio.serve_listeners(self._connection, listeners)

    async def _connection(self, stream: trio.SocketStream) -> None:
        try:
            host = str(stream.socket.getpeername()[0])
        except OSError:  # gone already
            await trio.aclose_forcefully(stream)
            return
        wire = _Wire(stream, self._traffic)
        self._by_host[host] += 1
        self._connections += 1
        try:
            if (
                self._connections > defaults.BULK_CONNECTIONS_MAX
                or self._by_host[host] > defaults.BULK_CONNECTIONS_PER_ADDRESS_MAX
            ):
                await wire.send(_plain_head(503) + b"too many connections")
                return
            session = _Session(self, wire, host)
            try:
                await session.run()
            finally:
                session.end()
        except _Broken as broken:
            log.debug("bulk client %s %s", host, broken)
        except Exception:  # a defect here must not let a stranger stop this peer
            log.exception("serving the bulk plane to %s failed", host)
        finally:
            self._connections -= 1
            self._by_host[host] -= 1
            if not self._by_host[host]:
                del self._by_host[host]
            wire.close()

    def service(self) -> BulkService:
        service = self._service()
        if service is None:
            raise _Reply(404, "this peer serves no blobs")
        return service

    def disk(self) -> Disk:
        return self._disk

    def peer_id(self) -> PeerId:
        return self._peer_id

    # --- the same over a stream ---

    async def serve_stream(self, stream: Stream) -> None:
        """The handler of `BLOB_PROTOCOL`."""
        first = None
        with trio.move_on_after(defaults.BULK_HEAD_SECONDS) as scope:
            first = await stream.receive()
        if scope.cancelled_caught:
            raise StreamError(f"{stream.peer} asked for nothing in time")
        try:
            ask = _ask_of(first)
            service = self.service()
            self._admit_stream(service, stream.peer, ask.credential)
            if ask.push:
                await self._receive_over_stream(service, stream, ask)
            else:
                await self._send_over_stream(service, stream, ask)
        except _Reply as reply:
            await stream.send(_encode(Answer(reply.status, reply.text, 0)))
        except Refused as refused:
            await stream.send(_encode(Answer(refused.status, refused.reason, 0)))
        except DiskFullError:
            await stream.send(_encode(Answer(507, "no space left", 0)))
        except _Broken as broken:
            raise StreamError(f"{stream.peer} {broken}") from broken

    def forget(self, peer: PeerId) -> None:
        """A peer's connection ended: its admission is asked again on the next."""
        self._stream_admissions.pop(peer, None)

    def _admit_stream(self, service: BulkService, peer: PeerId, credential: bytes) -> None:
        now = trio.current_time()
        held = self._stream_admissions.get(peer)
        if (
            held is None
            or held.credential != credential
            or now - held.asked_at > defaults.BULK_ADMITTED_SECONDS
        ):
            held = _StreamAdmission(credential, now, service.admits(peer, credential))
            self._stream_admissions[peer] = held
        if not held.admitted:
            raise _Reply(403, "this peer is not admitted")

    async def _send_over_stream(self, service: BulkService, stream: Stream, ask: Ask) -> None:
        blob = service.open(stream.peer, ask.digest)
        still = functools.partial(service.admits, stream.peer, ask.credential)
        pace = _Pace(blob.size_bytes, still)
        try:
            with pace.scope:
                await stream.send(_encode(Answer(200, "", blob.size_bytes)))
                while pace.done < blob.size_bytes:
                    size = min(defaults.BULK_STREAM_FRAME_BYTES, blob.size_bytes - pace.done)
                    await self.uplink.take(size, pace)
                    data = await self._disk.read(blob.path, blob.offset + pace.done, size)
                    if len(data) != size:
                        raise StreamError(f"{blob.path} is shorter than its blob")
                    await stream.send(data)
                    pace.moved()
                    self._traffic.sent += size
                    pace.done += size
            if pace.scope.cancelled_caught:
                raise _Broken(pace.complaint())
        finally:
            blob.release()

    async def _receive_over_stream(self, service: BulkService, stream: Stream, ask: Ask) -> None:
        reference = BlobReference(ask.digest, ask.size_bytes)
        sink = service.accept(stream.peer, reference)
        try:
            await stream.send(_encode(Answer(100, "", 0)))
            still = functools.partial(service.admits, stream.peer, ask.credential)
            await _drain_into(stream, sink, ask.size_bytes, self._traffic, still)
            await _finish_push(service, stream.peer, reference, sink)
        except BaseException:
            sink.abandon()
            raise
        await stream.send(_encode(Answer(204, "", 0)))


def _ask_of(frame: bytes | None) -> Ask:
    try:
        ask = _decode_ask(frame or b"")
    except DECODE_ERRORS as error:
        raise _Reply(400, "that asks for no blob") from error
    if len(ask.digest) != 32 or not 0 <= ask.size_bytes <= defaults.BULK_BLOB_BYTES_MAX:
        raise _Reply(400, "bad digest or size")
    return ask


class _Session:
    """One HTTP connection, request after request."""

    def __init__(self, server: BulkServer, wire: _Wire, host: str) -> None:
        self._server = server
        self._wire = wire
        self._host = host
        self._client: PeerId | None = None
        self._credential = b""
        self._challenge: bytes | None = None
        self._admitted_at: float | None = None
        """When this client was last found to be admitted."""

    def end(self) -> None:
        """The connection is nobody's any more."""
        if self._client is not None:
            self._server.by_peer[self._client] -= 1
            if not self._server.by_peer[self._client]:
                del self._server.by_peer[self._client]
            self._client = None

    async def run(self) -> None:
        close = False
        while not close:
            digest = await self._wire.plain_get(defaults.BULK_IDLE_SECONDS)
            if digest is not None:
                try:
                    page = self._server.pages.get(b"/blob/" + digest.hex().encode())
                    if page is not None:
                        await self._small_request()
                        await self._reply(200, page)
                    else:
                        await self._send_blob(digest, head_only=False)
                except _Reply as reply:
                    close = reply.close
                    await self._refuse(reply, close=close)
                continue
            # A fresh parser each time: bodies bypass it, so it could not follow the connection.
            parser = h11.Connection(
                h11.SERVER, max_incomplete_event_size=defaults.BULK_HEAD_BYTES_MAX
            )
            try:
                request = await self._wire.head(parser, defaults.BULK_IDLE_SECONDS)
            except h11.RemoteProtocolError as error:
                await self._wire.send(_plain_head(400) + str(error).encode("ascii", "replace"))
                return
            assert isinstance(request, h11.Request)
            close = await self._answer(request)

    async def _answer(self, request: h11.Request) -> bool:
        """Answer one request; True when the connection must end."""
        headers = {bytes(name): bytes(value) for name, value in request.headers}
        size = headers.get(b"content-length", b"0")
        length = int(size) if size.isdigit() and len(size) < 16 else -1
        close = headers.get(b"connection", b"").lower() == b"close" or request.http_version < b"1.1"
        body_left = length != 0 or b"transfer-encoding" in headers
        try:
            if b"transfer-encoding" in headers or length < 0:
                raise _Reply(411, "send a Content-Length")
            method, target = bytes(request.method), bytes(request.target)
            if target in self._server.pages and method == b"GET" and not body_left:
                await self._small_request()
                await self._reply(200, self._server.pages[target])
            elif target == b"/challenge" and method == b"GET" and not body_left:
                await self._small_request()
                self._challenge = secrets.token_bytes(CHALLENGE_BYTES)
                await self._reply(200, self._challenge)
            elif target == b"/admission" and method == b"POST":
                if length > _PROOF_BYTES_MAX:
                    raise _Reply(413, "the proof is too long")
                body = await self._wire.small_body(length)
                body_left = False
                await self._small_request()
                self._prove(body)
                await self._reply(204, b"")
            else:
                match = _BLOB_PATH.fullmatch(target)
                if match is None:
                    raise _Reply(404, "no such path")
                digest = bytes.fromhex(match[1].decode("ascii"))
                if method in (b"GET", b"HEAD") and not body_left:
                    await self._send_blob(digest, head_only=method == b"HEAD")
                elif method == b"PUT":
                    service = self._check_admitted()
                    reference = BlobReference(digest, length)
                    sink = self._accept(service, reference)
                    expects = headers.get(b"expect", b"").lower() == b"100-continue"
                    await self._receive_blob(service, reference, sink, expects)
                    body_left = False
                    await self._reply(204, b"")
                else:
                    raise _Reply(405, "only GET, HEAD and PUT")
        except _Reply as reply:
            close = close or reply.close or body_left
            await self._refuse(reply, close=close)
        return close

    async def _refuse(self, reply: _Reply, *, close: bool) -> None:
        await self._small_request()
        await self._reply(reply.status, reply.text.encode("utf-8"), close=close)

    async def _small_request(self) -> None:
        """Wait for the turn of a request that moves no blob: by address, and by peer if known."""
        await self._wait_turn(self._host)
        if self._client is not None:
            await self._wait_turn(self._client)

    async def _wait_turn(self, name: str) -> None:
        now = trio.current_time()
        bucket = self._server.rates.of(name)
        seconds = bucket.debt_seconds(now)
        bucket.borrow(1, now)
        if seconds:
            await trio.sleep(seconds)

    def _prove(self, body: bytes) -> None:
        challenge, self._challenge = self._challenge, None
        if challenge is None:
            raise _Reply(403, "ask for a challenge first", close=True)
        try:
            proof = _decode_proof(body)
        except DECODE_ERRORS as error:
            raise _Reply(400, "that is no proof", close=True) from error
        message = proof_message(self._server.peer_id(), challenge)
        if not verify(proof.peer, message, proof.signature):
            raise _Reply(403, "the proof does not hold", close=True)
        peer = PeerId(proof.peer)
        if not self._server.service().admits(peer, proof.credential):
            raise _Reply(403, "this peer is not admitted", close=True)
        self.end()  # it may have been a peer's before, or this one's
        if self._server.by_peer[peer] >= defaults.BULK_CONNECTIONS_PER_PEER_MAX:
            raise _Reply(503, "too many connections of this peer", close=True)
        self._client, self._credential = peer, proof.credential
        self._admitted_at = trio.current_time()
        self._server.by_peer[peer] += 1

    def _still_admitted(self) -> bool:
        return self._server.service().admits(self._client, self._credential)

    def _check_admitted(self) -> BulkService:
        now = trio.current_time()
        if self._admitted_at is None or now - self._admitted_at > defaults.BULK_ADMITTED_SECONDS:
            self._admitted_at = now if self._still_admitted() else None
        if self._admitted_at is None:
            # A new admission needs a new proof: the client makes one on its next connection.
            proved = self._client is not None
            text = "this peer is not admitted any more" if proved else "prove who you are first"
            raise _Reply(403, text, close=proved)
        return self._server.service()

    async def _send_blob(self, digest: bytes, *, head_only: bool) -> None:
        blob = self._open(self._check_admitted(), digest)
        try:
            path = self._server.disk().local_path(blob.path)
            if not path.is_file():
                raise _Reply(404, "the blob is gone")
            head = _head(200, blob.size_bytes, b"application/octet-stream", close=False)
            await self._wire.send(head, more=bool(blob.size_bytes) and not head_only)
            if head_only:
                await self._small_request()
            else:
                await self._wire.send_file(
                    path, blob.offset, blob.size_bytes, self._server.uplink, self._still_admitted
                )
        finally:
            blob.release()

    def _open(self, service: BulkService, digest: bytes) -> OpenBlob:
        try:
            return service.open(self._client, digest)
        except Refused as refused:
            raise _Reply(refused.status, refused.reason) from refused

    def _accept(self, service: BulkService, reference: BlobReference) -> Sink:
        if reference.size_bytes > defaults.BULK_BLOB_BYTES_MAX:
            raise _Reply(413, f"at most {defaults.BULK_BLOB_BYTES_MAX} bytes")
        try:
            return service.accept(self._client, reference)
        except Refused as refused:
            raise _Reply(refused.status, refused.reason) from refused

    async def _receive_blob(
        self, service: BulkService, reference: BlobReference, sink: Sink, expects: bool
    ) -> None:
        try:
            if expects:
                await self._wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            try:
                await self._wire.body(reference.size_bytes, sink.write, self._still_admitted)
                await _finish_push(service, self._client, reference, sink)
            except DiskFullError as error:
                raise _Reply(507, "no space left", close=True) from error
            except Refused as refused:
                raise _Reply(refused.status, refused.reason) from refused
        except BaseException:
            sink.abandon()
            raise

    async def _reply(self, status: int, body: bytes, *, close: bool = False) -> None:
        kind = b"application/octet-stream" if status == 200 else b"text/plain; charset=utf-8"
        await self._wire.send(_head(status, len(body), kind, close=close) + body)


async def _finish_push(
    service: BulkService, client: PeerId | None, reference: BlobReference, sink: Sink
) -> None:
    piece = sink.finish()
    if not piece.verify(reference.digest):
        raise _Reply(422, "the bytes have another hash")
    await service.received(client, reference, sink, piece)


def _head(status: int, size_bytes: int, kind: bytes, *, close: bool) -> bytes:
    end = b"connection: close\r\n\r\n" if close else b"\r\n"
    return b"HTTP/1.1 %d \r\ncontent-length: %d\r\ncontent-type: %s\r\n%s" % (
        status,
        size_bytes,
        kind,
        end,
    )


def _plain_head(status: int) -> bytes:
    return b"HTTP/1.1 %d Refused\r\nconnection: close\r\ncontent-type: text/plain\r\n\r\n" % status


# --- asking ----------------------------------------------------------------------------------


class BulkClient:
    """Fetches and pushes over HTTP, with kept-alive connections per source."""

    def __init__(
        self,
        identity: Identity,
        disk: Disk,
        credential: Callable[[], bytes],
        traffic: Traffic,
        *,
        uplink: Uplink | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`uplink`: a limit on what is pushed; `tls`: how https mirrors are verified (as the
        system does)."""
        self._traffic = traffic
        self._uplink = uplink or Uplink()
        self._tls = tls
        self._identity = identity
        self._disk = disk
        self._credential = credential
        self._idle: dict[tuple[str, PeerId | None, bytes], list[tuple[_Wire, float]]] = {}
        self._looked_at = 0.0
        """When all idle connections were last looked at."""
        self._round_trips: OrderedDict[str, float] = OrderedDict()
        """By root: the shortest time that connecting took, in seconds."""
        self._unreachable: OrderedDict[tuple[str, PeerId | None], float] = OrderedDict()
        """Roots where nobody answered, and since when."""

    async def fetch(
        self,
        root: str,
        peer: PeerId | None,
        reference: BlobReference,
        sink: Sink,
        *,
        connect_seconds: float = defaults.BULK_CONNECT_SECONDS,
    ) -> Piece:
        """GET a blob from the `http://host:port` root; raises `FetchError`, `Unreachable`."""
        async with self._wire(root, peer, connect_seconds) as wire:
            await self._request(wire, _blob_request(root, reference.digest))
            return await self._receive_blob(wire, root, reference, sink)

    async def fetch_run(
        self,
        root: str,
        peer: PeerId | None,
        wanted: Sequence[tuple[BlobReference, Sink]],
        arrived: Arrived,
        *,
        connect_seconds: float = defaults.BULK_CONNECT_SECONDS,
    ) -> None:
        """GET several blobs on one connection, one after the other: asked of a peer at once, of a
        mirror in turn (some do not understand that). Raises as `fetch` does, `Unreachable` only
        before the first."""
        async with self._wire(root, peer, connect_seconds) as wire:
            if peer is not None:
                heads = [_blob_request(root, reference.digest) for reference, _ in wanted]
                await self._request(wire, b"".join(heads), len(heads))
            for reference, sink in wanted:
                if peer is None:
                    await self._request(wire, _blob_request(root, reference.digest))
                await arrived(await self._receive_blob(wire, root, reference, sink))

    async def _receive_blob(
        self, wire: _Wire, root: str, reference: BlobReference, sink: Sink
    ) -> Piece:
        size = await wire.plain_blob(reference.size_bytes, sink.write)
        if size >= 0:
            self._check_size(root, size, reference)
            wire.unanswered -= 1
            return sink.finish()
        status, size = await self._response(wire, root)
        if status != 200:
            raise await self._refusal(wire, root, status, size)
        self._check_size(root, size, reference)
        await wire.body(size, sink.write)
        wire.unanswered -= 1
        return sink.finish()

    async def document(self, root: str, path: str, bytes_max: int) -> bytes:
        """GET a small document of a mirror; raises `FetchError`, `Unreachable`."""
        async with self._wire(root, None, defaults.BULK_CONNECT_SECONDS) as wire:
            await self._request(wire, _request_head(root, b"GET", path, []))
            status, size = await self._response(wire, root)
            if status != 200:
                raise await self._refusal(wire, root, status, size)
            if size > bytes_max:
                raise FetchError(f"{root}{path} has {size} bytes, more than {bytes_max}")
            return await self._small_answer(wire, size, bytes_max)

    @staticmethod
    def _check_size(root: str, size: int, reference: BlobReference) -> None:
        if size != reference.size_bytes:
            raise FetchError(
                f"{root} offers {size} bytes of a blob of {reference.size_bytes}", lacks=True
            )

    async def push(
        self,
        root: str,
        peer: PeerId | None,
        reference: BlobReference,
        path: str,
        *,
        connect_seconds: float = defaults.BULK_CONNECT_SECONDS,
    ) -> None:
        """PUT the local file `path`; raises `FetchError`, `Unreachable`."""
        size = self._disk.size_bytes(path)
        if size != reference.size_bytes:
            raise FetchError(f"{path} has {size} bytes, not {reference.size_bytes}")
        async with self._wire(root, peer, connect_seconds) as wire:
            headers = [(b"content-length", b"%d" % size), (b"expect", b"100-continue")]
            path_there = f"/blob/{reference.digest.hex()}"
            await self._request(wire, _request_head(root, b"PUT", path_there, headers))
            status, length = await self._response(wire, root)
            if status == 100:
                try:
                    await wire.send_file(self._disk.local_path(path), 0, size, self._uplink)
                except _Broken as broken:
                    # It may have said why before it closed; if not, that raises in turn.
                    log.debug("%s %s", root, broken)
                    wire.ends = True
                status, length = await self._response(wire, root)
            else:
                wire.ends = True  # the server may still wait for the body
            if status not in (200, 201, 204):
                raise await self._refusal(wire, root, status, length)
            await self._small_answer(wire, length, defaults.BULK_HEAD_BYTES_MAX)

    def close(self) -> None:
        """Close all idle connections."""
        for wires in self._idle.values():
            for wire, _ in wires:
                wire.close()
        self._idle.clear()

    def may_reach(self, root: str, peer: PeerId | None) -> bool:
        """False for a minute after nobody answered there."""
        since = self._unreachable.get((root, peer))
        return since is None or trio.current_time() - since > defaults.BULK_UNREACHABLE_SECONDS

    def forget(self, peer: PeerId) -> None:
        """A peer has come back: all its roots may be reached."""
        for key in [key for key in self._unreachable if key[1] == peer]:
            del self._unreachable[key]

    @asynccontextmanager
    async def _wire(
        self, root: str, peer: PeerId | None, connect_seconds: float
    ) -> AsyncIterator[_Wire]:
        """A proved connection; kept when every request made on it was answered whole, also if
        that was a refusal."""
        key = (root, peer, self._credential() if peer else b"")
        wire = self._reuse(key) or await self._open(root, peer, key[2], connect_seconds)
        try:
            yield wire
        except _Broken as error:
            raise FetchError(f"{root} {error}") from error
        except h11.RemoteProtocolError as error:
            raise FetchError(f"{root} speaks no HTTP: {error}") from error
        finally:
            idle = len(self._idle.get(key, ()))
            if wire.can_be_kept:
                self._unreachable.pop((root, peer), None)
            if wire.can_be_kept and idle < defaults.BULK_POOL_PER_SOURCE:
                self._idle.setdefault(key, []).append((wire, trio.current_time()))
            else:
                wire.close()

    def _reuse(self, key: tuple[str, PeerId | None, bytes]) -> _Wire | None:
        """An idle connection that is still open, if there is one; drops all that are stale, looking
        once a second."""
        now = trio.current_time()
        if now - self._looked_at > defaults.BULK_ADMITTED_SECONDS:
            self._looked_at = now
            for other in list(self._idle):
                for wire, since in list(self._idle[other]):
                    if now - since > defaults.BULK_IDLE_SECONDS / 2 or _is_closed(wire):
                        self._idle[other].remove((wire, since))
                        wire.close()
                if not self._idle[other]:
                    del self._idle[other]
        pool = self._idle.get(key, [])
        while pool:
            wire, _ = pool.pop()
            if not _is_closed(wire):
                return wire
            wire.close()
        return None

    async def _open(
        self, root: str, peer: PeerId | None, credential: bytes, connect_seconds: float
    ) -> _Wire:
        """Connect and prove, within `connect_seconds`; raises `Unreachable`, `FetchError`."""
        with trio.move_on_after(connect_seconds):
            stream = await self._connect(root, peer)
            wire = _Wire(stream, self._traffic)
            try:
                if peer is not None:
                    await self._prove(wire, root, peer, credential)
            except BaseException as error:
                wire.close()
                if isinstance(error, _Broken):
                    raise Unreachable(f"{root} {error}") from error
                if isinstance(error, h11.RemoteProtocolError):
                    raise Unreachable(f"{root} speaks no HTTP: {error}") from error
                raise
            return wire
        self._note_unreachable(root, peer)
        raise Unreachable(f"{root} cannot be reached: no answer in time")

    async def _connect(
        self, root: str, peer: PeerId | None
    ) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
        host, port, secure = _split_root(root)
        began = trio.current_time()
        try:
            stream = await trio.open_tcp_stream(host, port)
            self._note_round_trip(root, trio.current_time() - began)
            return await self._secured(stream, host) if secure else stream
        except (OSError, UnicodeError, trio.BrokenResourceError) as error:
            self._note_unreachable(root, peer)
            raise Unreachable(f"{root} cannot be reached: {_why(error)}") from error

    def _note_unreachable(self, root: str, peer: PeerId | None) -> None:
        self._unreachable.pop((root, peer), None)
        self._unreachable[root, peer] = trio.current_time()
        if len(self._unreachable) > defaults.SOURCES_KNOWN_MAX:
            self._unreachable.popitem(last=False)

    def _note_round_trip(self, root: str, seconds: float) -> None:
        self._round_trips[root] = min(seconds, self._round_trips.get(root, seconds))
        if len(self._round_trips) > defaults.SOURCES_KNOWN_MAX:
            self._round_trips.popitem(last=False)

    def round_trip_seconds(self, roots: Sequence[str]) -> float:
        """The shortest to any of these; 0 if none was measured."""
        known = (self._round_trips[root] for root in roots if root in self._round_trips)
        return min(known, default=0.0)

    async def _secured(
        self, stream: trio.SocketStream, host: str
    ) -> trio.SSLStream[trio.SocketStream]:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        secured = trio.SSLStream(stream, self._tls, server_hostname=host, https_compatible=True)
        try:
            await secured.do_handshake()
        except BaseException:
            stream.socket.close()
            raise
        return secured

    async def _prove(self, wire: _Wire, root: str, peer: PeerId, credential: bytes) -> None:
        await self._request(wire, _request_head(root, b"GET", "/challenge", []))
        status, size = await self._response(wire, root)
        if status in defaults.BULK_BUSY_STATUSES:
            raise await self._refusal(wire, root, status, size)
        body = await self._small_answer(wire, size, defaults.BULK_HEAD_BYTES_MAX)
        if status != 200 or len(body) != CHALLENGE_BYTES:
            return  # a plain web server in front: it will do without a proof, or refuse
        proof = Proof(
            self._identity.peer_id, self._identity.sign(proof_message(peer, body)), credential
        )
        encoded = _encode(proof)
        headers = [(b"content-length", b"%d" % len(encoded))]
        await self._request(wire, _request_head(root, b"POST", "/admission", headers) + encoded)
        status, size = await self._response(wire, root)
        if status != 204:
            raise await self._refusal(wire, root, status, size)
        await self._small_answer(wire, size, 0)

    async def _request(self, wire: _Wire, data: bytes, count: int = 1) -> None:
        """Send so many requests."""
        wire.unanswered += count
        await wire.send(data)

    async def _small_answer(self, wire: _Wire, size: int, bytes_max: int) -> bytes:
        """A body of `size` bytes, or its first `bytes_max`: the connection is of no use then."""
        body = await wire.small_body(min(size, bytes_max))
        if size <= bytes_max:
            wire.unanswered -= 1
        return body

    async def _response(self, wire: _Wire, root: str) -> tuple[int, int]:
        """Status and Content-Length of the next head (100 included)."""
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=defaults.BULK_HEAD_BYTES_MAX)
        # The parser must believe that a request is out; what it says about it is thrown away.
        parser.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        head = await wire.head(parser, defaults.BULK_STALL_SECONDS)
        if isinstance(head, h11.InformationalResponse):
            return head.status_code, 0
        assert isinstance(head, h11.Response)
        headers = {bytes(name): bytes(value) for name, value in head.headers}
        closes = b"close" in headers.get(b"connection", b"").lower()
        if closes or head.http_version < b"1.1" or b"transfer-encoding" in headers:
            wire.ends = True
        if head.status_code == 204:
            return 204, 0
        size = headers.get(b"content-length", b"")
        if size.isdigit() and len(size) < 16:
            return head.status_code, int(size)
        if head.status_code == 200:
            raise FetchError(f"{root} does not say how many bytes it sends")
        wire.ends = True
        return head.status_code, 0

    async def _refusal(self, wire: _Wire, root: str, status: int, size: int) -> FetchError:
        if status < 200:
            wire.ends = True  # the answer itself is still to come
        body = await self._small_answer(wire, size, defaults.BULK_REASON_BYTES_MAX)
        reason = body.decode("utf-8", "replace").splitlines()[:1] or [""]
        return refusal(root, status, "".join(filter(str.isprintable, reason[0])))


def refusal(name: str, status: int, reason: str) -> FetchError:
    """A refusal as the client sees it; some statuses may pass with time."""
    return FetchError(
        f"{name} refused: {status} {reason}",
        retry=status in defaults.BULK_RETRY_STATUSES,
        busy=status in defaults.BULK_BUSY_STATUSES,
        lacks=status in defaults.BULK_LACKS_STATUSES,
    )


def _why(error: BaseException) -> str:
    """What kept a connection from being made; of several attempts, the first."""
    cause = error.__cause__ or error
    if isinstance(cause, ExceptionGroup):
        cause = cause.exceptions[0]
    if isinstance(cause, OSError) and cause.strerror:
        # trio puts the address before it, which the caller names already.
        return cause.strerror.rpartition("): ")[2]
    return str(cause)


@functools.lru_cache(maxsize=256)
def _split_root(root: str) -> tuple[str, int, bool]:
    """(host, port, whether it is https); raises `Unreachable`."""
    try:
        parts = urllib.parse.urlsplit(root)
        printable = root.isascii() and root.isprintable() and " " not in root
        if parts.scheme not in ("http", "https") or not parts.hostname or len(root) > 300:
            raise ValueError("no http root")
        if not printable or parts.query or parts.fragment or "@" in parts.netloc:
            raise ValueError("no plain root")
        secure = parts.scheme == "https"
        return parts.hostname, parts.port or (443 if secure else 80), secure
    except ValueError as error:
        raise Unreachable(f"{root[:100]!r} is no http://host:port address") from error


@functools.lru_cache(maxsize=256)
def _places(root: str) -> tuple[bytes, bytes]:
    """(path, host header) of a root that `_split_root` has accepted."""
    parts = urllib.parse.urlsplit(root)
    return parts.path.rstrip("/").encode("ascii"), parts.netloc.encode("ascii")


def _request_head(root: str, method: bytes, path: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    prefix, host = _places(root)
    lines = [b"%s %s%s HTTP/1.1" % (method, prefix, path.encode("ascii")), b"host: " + host]
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join([*lines, b"", b""])


def _blob_request(root: str, digest: bytes) -> bytes:
    return _request_head(root, b"GET", f"/blob/{digest.hex()}", [])


def _is_closed(wire: _Wire) -> bool:
    """Whether the server has closed an idle connection (or said something unasked)."""
    poll = select.poll()
    poll.register(wire.socket.fileno(), select.POLLIN)
    return bool(poll.poll(0))


# --- asking over a stream --------------------------------------------------------------------


async def fetch_over_stream(
    stream: Stream, reference: BlobReference, sink: Sink, credential: bytes, traffic: Traffic
) -> Piece:
    """The client's side of a get; raises `FetchError`."""
    try:
        await stream.send(_encode(Ask(False, reference.digest, reference.size_bytes, credential)))
        await stream.end()
        answer = await _receive_answer(stream)
        if answer.status != 200:
            raise refusal(stream.peer, answer.status, answer.reason[:200])
        if answer.size_bytes != reference.size_bytes:
            raise FetchError(
                f"{stream.peer} offers {answer.size_bytes} bytes of a blob of "
                f"{reference.size_bytes}"
            )
        await _drain_into(stream, sink, reference.size_bytes, traffic)
    except StreamError as error:
        raise FetchError(str(error)) from error
    finally:
        await stream.reset()
    return sink.finish()


async def push_over_stream(
    stream: Stream,
    reference: BlobReference,
    disk: Disk,
    path: str,
    credential: bytes,
    traffic: Traffic,
) -> None:
    """The client's side of a put; raises `FetchError`."""
    size = disk.size_bytes(path)
    try:
        if size != reference.size_bytes:
            raise FetchError(f"{path} has {size} bytes, not {reference.size_bytes}")
        await stream.send(_encode(Ask(True, reference.digest, size, credential)))
        answer = await _receive_answer(stream)
        if answer.status == 100:
            for offset in range(0, size, defaults.BULK_STREAM_FRAME_BYTES):
                count = min(defaults.BULK_STREAM_FRAME_BYTES, size - offset)
                await stream.send(await disk.read(path, offset, count))
                traffic.sent += count
            await stream.end()
            answer = await _receive_answer(stream)
        if answer.status != 204:
            raise refusal(stream.peer, answer.status, answer.reason[:200])
    except StreamError as error:
        raise FetchError(str(error)) from error
    finally:
        await stream.reset()


async def _receive_answer(stream: Stream) -> Answer:
    with trio.move_on_after(defaults.BULK_STALL_SECONDS):
        frame = await stream.receive()
        try:
            return _decode_answer(frame or b"")
        except DECODE_ERRORS as error:
            raise FetchError(f"{stream.peer} answered nonsense: {error}") from error
    raise FetchError(f"{stream.peer} has sent nothing for {defaults.BULK_STALL_SECONDS:g} s")


async def _drain_into(
    stream: Stream,
    sink: Sink,
    size_bytes: int,
    traffic: Traffic,
    still: Callable[[], bool] = lambda: True,
) -> None:
    """Exactly `size_bytes` in DATA frames, as long as `still()`."""
    pace = _Pace(size_bytes, still)
    done = 0
    with pace.scope:
        while done < size_bytes:
            frame = await stream.receive()
            if frame is None or done + len(frame) > size_bytes:
                raise StreamError(f"{stream.peer} sent a wrong number of bytes")
            pace.moved()
            sink.write(frame)
            traffic.received += len(frame)
            done += len(frame)
            pace.done = done
    if pace.scope.cancelled_caught:
        raise StreamError(f"{stream.peer} {pace.complaint()}")
