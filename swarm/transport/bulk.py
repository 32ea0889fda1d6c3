"""The bulk plane: blobs named by their BLAKE3-256 hash, over HTTP/1.1.

    GET  /blob/<64 hex digits>   the bytes; HEAD likewise without them
    PUT  /blob/<64 hex digits>   push; `Expect: 100-continue` asks before sending
    GET  /challenge              32 random bytes, good once on this connection
    POST /admission              msgpack [peer id, signature, credential]

A client proves itself once a connection: it signs `PROOF_DOMAIN ‖ server's peer id ‖ challenge`,
so a proof is of no use on another connection or at another server. Whoever proves nothing is
`None` to the `BulkService`. Heads go through h11, each with a fresh parser; bodies never do: they
go out by sendfile and come in by recv_into, straight into the sink, which hashes them.

A peer without a usable HTTP address is asked the same over a stream, `/swarm/blob/1.0.0`:
`Ask`, then `Answer` and DATA frames (get), or `Answer`, DATA frames from the client and a second
`Answer` (put).
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import select
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import h11
import msgspec
import trio

from swarm import PROTOCOL_VERSION, defaults
from swarm.errors import DECODE_ERRORS, DiskFullError
from swarm.identity import Identity, PeerId, verify
from swarm.transport import (
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


class _Wire:
    """One TCP connection: heads by h11, bodies around it."""

    def __init__(self, stream: trio.SocketStream, traffic: Traffic) -> None:
        self.stream = stream
        self._traffic = traffic
        self._ahead = b""  # received beyond the last head

    def close(self) -> None:
        self.stream.socket.close()

    async def send(self, data: bytes) -> None:
        """Small things: heads and reasons."""
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
        scope = trio.CancelScope(deadline=trio.current_time() + idle_seconds)
        began = False
        with scope:
            parser.receive_data(self._ahead) if self._ahead else None
            while True:
                event = parser.next_event()
                if isinstance(event, h11.Request | h11.Response | h11.InformationalResponse):
                    self._ahead = bytes(parser.trailing_data[0])
                    return event
                if event is not h11.NEED_DATA:
                    raise _Broken("closed the connection")
                data = await self._receive_some()
                if not data:
                    raise _Broken("closed the connection")
                if not began:
                    began = True
                    scope.deadline = trio.current_time() + defaults.BULK_HEAD_SECONDS
                parser.receive_data(data)
        raise _Broken("said nothing in time")

    async def _receive_some(self) -> bytes:
        try:
            return bytes(await self.stream.receive_some(defaults.BULK_HEAD_BYTES_MAX))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise _Broken("closed the connection") from error

    async def small_body(self, size_bytes: int) -> bytes:
        body = bytearray()
        await self.body(size_bytes, body.extend)
        self._traffic.received -= size_bytes  # that was no blob
        return bytes(body)

    async def body(self, size_bytes: int, write: Callable[[memoryview], object]) -> None:
        """Receive exactly `size_bytes` into `write`."""
        pace = _Pace(size_bytes)
        head = memoryview(self._ahead)[:size_bytes]
        self._ahead = self._ahead[len(head) :]
        done = len(head)
        if head:
            self._traffic.received += len(head)
            write(head)
        buffer = memoryview(bytearray(min(defaults.BULK_READ_BYTES, max(size_bytes - done, 1))))
        while done < size_bytes:
            with pace.step() as scope:
                try:
                    count = await self.stream.socket.recv_into(buffer[: size_bytes - done])
                except OSError as error:
                    raise _Broken(f"broke off after {done} bytes") from error
            if scope.cancelled_caught:
                raise _Broken(pace.complaint(done))
            if not count:
                raise _Broken(f"broke off after {done} bytes")
            self._traffic.received += count
            write(buffer[:count])
            done += count

    async def send_file(self, path: str | os.PathLike[str], offset: int, size_bytes: int) -> None:
        """A range of a file, by sendfile; raises `_Broken`, or `OSError` if it cannot be opened."""
        pace = _Pace(size_bytes)
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < size_bytes:
                wanted = min(size_bytes - done, defaults.BULK_READ_BYTES)
                try:
                    count = os.sendfile(self.stream.socket.fileno(), file, offset + done, wanted)
                except BlockingIOError:
                    with pace.step() as scope:
                        await trio.lowlevel.wait_writable(self.stream.socket)
                    if scope.cancelled_caught:
                        raise _Broken(pace.complaint(done)) from None
                    continue
                except OSError as error:
                    raise _Broken(f"broke off after {done} bytes") from error
                if not count:
                    raise _Broken("the file here is shorter than its blob")
                done += count
                self._traffic.sent += count
                if done < size_bytes:
                    await trio.lowlevel.checkpoint()
        finally:
            os.close(file)


class _Pace:
    """Deadlines of one body: no stall, and not too slow on the whole."""

    def __init__(self, size_bytes: int) -> None:
        self._began = trio.current_time()
        self._end = (
            self._began
            + defaults.BULK_STALL_SECONDS
            + size_bytes / defaults.BULK_BYTES_PER_SECOND_MIN
        )

    def step(self) -> trio.CancelScope:
        stall = trio.current_time() + defaults.BULK_STALL_SECONDS
        return trio.CancelScope(deadline=min(stall, self._end))

    def complaint(self, done: int) -> str:
        seconds = trio.current_time() - self._began
        return f"stalled or was too slow: {done} bytes in {seconds:.1f} s"


# --- serving ---------------------------------------------------------------------------------


class _Reply(Exception):
    """A status and a line of text ends a request."""

    def __init__(self, status: int, text: str, *, close: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.close = close


class BulkServer:
    """Answers the HTTP plane for one peer."""

    def __init__(
        self,
        peer_id: PeerId,
        disk: Disk,
        service: Callable[[], BulkService | None],
        traffic: Traffic,
    ) -> None:
        self._traffic = traffic
        self._peer_id = peer_id
        self._disk = disk
        self._service = service
        self._by_host: Counter[str] = Counter()
        self._connections = 0
        self._stream_admissions: dict[PeerId, tuple[bytes, bool]] = {}

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
            await _Session(self, wire).run()
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
        first = await stream.receive()
        try:
            ask = _decode_ask(first or b"")
            if len(ask.digest) != 32 or not 0 <= ask.size_bytes <= defaults.BULK_BLOB_BYTES_MAX:
                raise _Reply(400, "bad digest or size")
        except DECODE_ERRORS as error:
            raise StreamError(f"{stream.peer} asked for no blob: {error}") from error
        try:
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

    def forget(self, peer: PeerId) -> None:
        """A peer's connection ended: its admission is asked again on the next."""
        self._stream_admissions.pop(peer, None)

    def _admit_stream(self, service: BulkService, peer: PeerId, credential: bytes) -> None:
        held = self._stream_admissions.get(peer)
        if held is None or held[0] != credential:
            held = (credential, service.admits(peer, credential))
            self._stream_admissions[peer] = held
        if not held[1]:
            raise _Reply(403, "this peer is not admitted")

    async def _send_over_stream(self, service: BulkService, stream: Stream, ask: Ask) -> None:
        blob = service.open(stream.peer, ask.digest)
        try:
            await stream.send(_encode(Answer(200, "", blob.size_bytes)))
            done = 0
            while done < blob.size_bytes:
                size = min(defaults.BULK_STREAM_FRAME_BYTES, blob.size_bytes - done)
                data = await self._disk.read(blob.path, blob.offset + done, size)
                if len(data) != size:
                    raise StreamError(f"{blob.path} is shorter than its blob")
                await stream.send(data)
                self._traffic.sent += size
                done += size
        finally:
            blob.release()

    async def _receive_over_stream(self, service: BulkService, stream: Stream, ask: Ask) -> None:
        reference = BlobReference(ask.digest, ask.size_bytes)
        sink = service.accept(stream.peer, reference)
        try:
            await stream.send(_encode(Answer(100, "", 0)))
            await _drain_into(stream, sink, ask.size_bytes, self._traffic)
            await _finish_push(service, stream.peer, reference, sink)
        except BaseException:
            sink.abandon()
            raise
        await stream.send(_encode(Answer(204, "", 0)))


class _Session:
    """One HTTP connection, request after request."""

    def __init__(self, server: BulkServer, wire: _Wire) -> None:
        self._server = server
        self._wire = wire
        self._client: PeerId | None = None
        self._admitted: bool | None = None
        self._challenge: bytes | None = None
        self._parser = h11.Connection(h11.SERVER)

    async def run(self) -> None:
        close = False
        while not close:
            # A fresh parser each time: bodies bypass it, so it could not follow the connection.
            self._parser = h11.Connection(
                h11.SERVER, max_incomplete_event_size=defaults.BULK_HEAD_BYTES_MAX
            )
            try:
                request = await self._wire.head(self._parser, defaults.BULK_IDLE_SECONDS)
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
            if target == b"/challenge" and method == b"GET" and not body_left:
                self._challenge = secrets.token_bytes(CHALLENGE_BYTES)
                await self._reply(200, self._challenge)
            elif target == b"/admission" and method == b"POST":
                if length > _PROOF_BYTES_MAX:
                    raise _Reply(413, "the proof is too long")
                body = await self._wire.small_body(length)
                body_left = False
                self._prove(body)
                await self._reply(204, b"")
            else:
                match = _BLOB_PATH.fullmatch(target)
                if match is None:
                    raise _Reply(404, "no such path")
                digest = bytes.fromhex(match[1].decode("ascii"))
                service = self._server.service()
                self._check_admitted(service)
                if method in (b"GET", b"HEAD") and not body_left:
                    await self._send_blob(service, digest, head_only=method == b"HEAD")
                elif method == b"PUT":
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
            await self._reply(reply.status, reply.text.encode("utf-8"), close=close)
        return close

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
        self._client, self._admitted = peer, True

    def _check_admitted(self, service: BulkService) -> None:
        if self._admitted is None:
            self._admitted = service.admits(None, b"")
        if not self._admitted:
            raise _Reply(403, "prove who you are first")

    async def _send_blob(self, service: BulkService, digest: bytes, *, head_only: bool) -> None:
        blob = self._open(service, digest)
        try:
            path = self._server.disk().local_path(blob.path)
            if not path.is_file():
                raise _Reply(404, "the blob is gone")
            await self._wire.send(self._head(200, blob.size_bytes, b"application/octet-stream"))
            if not head_only:
                await self._wire.send_file(path, blob.offset, blob.size_bytes)
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
                await self._wire.body(reference.size_bytes, sink.write)
                await _finish_push(service, self._client, reference, sink)
            except DiskFullError as error:
                raise _Reply(507, "no space left", close=True) from error
            except Refused as refused:
                raise _Reply(refused.status, refused.reason) from refused
        except BaseException:
            sink.abandon()
            raise

    def _head(self, status: int, size_bytes: int, kind: bytes, *, close: bool = False) -> bytes:
        headers = [(b"content-length", b"%d" % size_bytes), (b"content-type", kind)]
        if close:
            headers.append((b"connection", b"close"))
        response = h11.Response(status_code=status, headers=headers)
        return bytes(self._parser.send(response) or b"")

    async def _reply(self, status: int, body: bytes, *, close: bool = False) -> None:
        kind = b"application/octet-stream" if status == 200 else b"text/plain; charset=utf-8"
        await self._wire.send(self._head(status, len(body), kind, close=close) + body)


async def _finish_push(
    service: BulkService, client: PeerId | None, reference: BlobReference, sink: Sink
) -> None:
    piece = sink.finish()
    if not piece.verify(reference.digest):
        raise _Reply(422, "the bytes have another hash")
    await service.received(client, reference, sink, piece)


def _plain_head(status: int) -> bytes:
    return b"HTTP/1.1 %d Refused\r\nconnection: close\r\ncontent-type: text/plain\r\n\r\n" % status


# --- asking ----------------------------------------------------------------------------------


class BulkClient:
    """Fetches and pushes over HTTP, with kept-alive connections per source."""

    def __init__(
        self, identity: Identity, disk: Disk, credential: Callable[[], bytes], traffic: Traffic
    ) -> None:
        self._traffic = traffic
        self._identity = identity
        self._disk = disk
        self._credential = credential
        self._idle: dict[tuple[str, PeerId | None, bytes], list[tuple[_Wire, float]]] = {}

    async def fetch(
        self, root: str, peer: PeerId | None, reference: BlobReference, sink: Sink
    ) -> Piece:
        """GET a blob from the `http://host:port` root; raises `FetchError`, `Unreachable`."""
        async with self._wire(root, peer) as wire:
            await self._request(wire, root, b"GET", reference.digest, [])
            status, size = await self._response(wire, root)
            if status != 200:
                raise await self._refusal(wire, root, status, size)
            if size != reference.size_bytes:
                raise FetchError(f"{root} offers {size} bytes of a blob of {reference.size_bytes}")
            await wire.body(size, sink.write)
        return sink.finish()

    async def push(
        self, root: str, peer: PeerId | None, reference: BlobReference, path: str
    ) -> None:
        """PUT the local file `path`; raises `FetchError`, `Unreachable`."""
        size = self._disk.size_bytes(path)
        if size != reference.size_bytes:
            raise FetchError(f"{path} has {size} bytes, not {reference.size_bytes}")
        async with self._wire(root, peer) as wire:
            headers = [(b"content-length", b"%d" % size), (b"expect", b"100-continue")]
            await self._request(wire, root, b"PUT", reference.digest, headers)
            status, length = await self._response(wire, root)
            if status == 100:
                try:
                    await wire.send_file(self._disk.local_path(path), 0, size)
                except _Broken as broken:
                    # It may have said why before it closed; if not, that raises in turn.
                    log.debug("%s %s", root, broken)
                status, length = await self._response(wire, root)
            if status not in (200, 201, 204):
                raise await self._refusal(wire, root, status, length)
            if length:
                await wire.small_body(min(length, defaults.BULK_HEAD_BYTES_MAX))

    def close(self) -> None:
        """Close all idle connections."""
        for wires in self._idle.values():
            for wire, _ in wires:
                wire.close()
        self._idle.clear()

    @asynccontextmanager
    async def _wire(self, root: str, peer: PeerId | None) -> AsyncIterator[_Wire]:
        """A proved connection, given back to the pool when the block ends well."""
        key = (root, peer, self._credential() if peer else b"")
        wire = self._reuse(key) or await self._open(root, peer, key[2])
        good = False
        try:
            try:
                yield wire
            except _Broken as error:
                raise FetchError(f"{root} {error}") from error
            except h11.RemoteProtocolError as error:
                raise FetchError(f"{root} speaks no HTTP: {error}") from error
            good = True
        finally:
            if good and len(self._idle.get(key, ())) < defaults.BULK_POOL_PER_SOURCE:
                self._idle.setdefault(key, []).append((wire, trio.current_time()))
            else:
                wire.close()

    def _reuse(self, key: tuple[str, PeerId | None, bytes]) -> _Wire | None:
        """An idle connection that is still open, if there is one; drops all that are stale."""
        now = trio.current_time()
        for other in list(self._idle):
            for wire, since in list(self._idle[other]):
                if now - since > defaults.BULK_IDLE_SECONDS / 2 or _is_closed(wire):
                    self._idle[other].remove((wire, since))
                    wire.close()
            if not self._idle[other]:
                del self._idle[other]
        pool = self._idle.get(key)
        return pool.pop()[0] if pool else None

    async def _open(self, root: str, peer: PeerId | None, credential: bytes) -> _Wire:
        host, port = _split_root(root)
        with trio.move_on_after(defaults.BULK_CONNECT_SECONDS) as scope:
            try:
                stream = await trio.open_tcp_stream(host, port)
            except OSError as error:
                raise Unreachable(f"{root} cannot be reached: {error}") from error
        if scope.cancelled_caught:
            raise Unreachable(f"{root} cannot be reached: no answer in time")
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

    async def _prove(self, wire: _Wire, root: str, peer: PeerId, credential: bytes) -> None:
        await wire.send(_request_head(root, b"GET", "/challenge", []))
        status, size = await self._response(wire, root)
        body = await wire.small_body(min(size, defaults.BULK_HEAD_BYTES_MAX))
        if status != 200 or len(body) != CHALLENGE_BYTES:
            return  # a plain web server in front: it will do without a proof, or refuse
        proof = Proof(
            self._identity.peer_id, self._identity.sign(proof_message(peer, body)), credential
        )
        encoded = _encode(proof)
        headers = [(b"content-length", b"%d" % len(encoded))]
        await wire.send(_request_head(root, b"POST", "/admission", headers) + encoded)
        status, size = await self._response(wire, root)
        if status != 204:
            raise await self._refusal(wire, root, status, size)

    async def _request(
        self,
        wire: _Wire,
        root: str,
        method: bytes,
        digest: bytes,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        await wire.send(_request_head(root, method, f"/blob/{digest.hex()}", headers))

    async def _response(self, wire: _Wire, root: str) -> tuple[int, int]:
        """Status and Content-Length of the next head (100 included)."""
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=defaults.BULK_HEAD_BYTES_MAX)
        # The parser must believe that a request is out; what it says about it is thrown away.
        parser.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        head = await wire.head(parser, defaults.BULK_STALL_SECONDS)
        if isinstance(head, h11.InformationalResponse):
            return head.status_code, 0
        assert isinstance(head, h11.Response)
        if head.status_code == 204:
            return 204, 0
        for name, value in head.headers:
            if name == b"content-length" and value.isdigit() and len(value) < 16:
                return head.status_code, int(value)
        if head.status_code == 200:
            raise FetchError(f"{root} does not say how many bytes it sends")
        return head.status_code, 0

    async def _refusal(self, wire: _Wire, root: str, status: int, size: int) -> FetchError:
        body = await wire.small_body(min(size, 200))
        reason = body.decode("utf-8", "replace").splitlines()[:1] or [""]
        return refusal(root, status, reason[0])


def refusal(name: str, status: int, reason: str) -> FetchError:
    """A refusal as the client sees it; some statuses may pass with time."""
    return FetchError(
        f"{name} refused: {status} {reason}", retry=status in defaults.BULK_RETRY_STATUSES
    )


def _split_root(root: str) -> tuple[str, int]:
    try:
        parts = urllib.parse.urlsplit(root)
        if parts.scheme != "http" or not parts.hostname or len(root) > 300 or not root.isascii():
            raise ValueError("no http root")
        return parts.hostname, parts.port or 80
    except ValueError as error:
        raise Unreachable(f"{root[:100]!r} is no http://host:port address") from error


def _request_head(root: str, method: bytes, path: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    parts = urllib.parse.urlsplit(root)
    parser = h11.Connection(h11.CLIENT)
    request = h11.Request(
        method=method,
        target=(parts.path.rstrip("/") + path).encode("ascii"),
        headers=[(b"host", parts.netloc.encode("ascii")), *headers],
    )
    return bytes(parser.send(request) or b"")


def _is_closed(wire: _Wire) -> bool:
    """Whether the server has closed an idle connection (or said something unasked)."""
    poll = select.poll()
    poll.register(wire.stream.socket.fileno(), select.POLLIN)
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


async def _drain_into(stream: Stream, sink: Sink, size_bytes: int, traffic: Traffic) -> None:
    """Exactly `size_bytes` in DATA frames."""
    pace = _Pace(size_bytes)
    done = 0
    while done < size_bytes:
        with pace.step() as scope:
            frame = await stream.receive()
        if scope.cancelled_caught:
            raise StreamError(f"{stream.peer} {pace.complaint(done)}")
        if frame is None or done + len(frame) > size_bytes:
            raise StreamError(f"{stream.peer} sent a wrong number of bytes")
        sink.write(frame)
        traffic.received += len(frame)
        done += len(frame)
