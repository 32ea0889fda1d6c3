"""The piece client: fetches and pushes over HTTP, on kept connections."""

import logging
import select
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import h11
import trio

from swarm.transport import BUSY_STATUSES, Arrived, BlobReference, FetchError, Traffic, refusal
from swarm.transport.http import limits, messages
from swarm.transport.http.pace import Broken, Uplink
from swarm.transport.http.wire import Buffers, Wire
from swarm.wire.identity import Identity, PeerId
from swarm.world import Disk, Piece, Sink
from swarm.world.recent import Recent

log = logging.getLogger(__name__)

REASON_BYTES_MAX = 200
"""Bytes read of a refusal's reason. After a longer one the connection is not used again."""


class Connection:
    """A connection to one root. All methods may raise `Broken` and `h11.RemoteProtocolError`."""

    def __init__(self, wire: Wire, root: str) -> None:
        self.wire = wire
        self.root = root
        self._unanswered = 0
        """Requests whose answers have not been received completely."""
        self.ends = False
        """The server closes the connection, or the start of its next answer is unknown."""

    @property
    def can_be_kept(self) -> bool:
        """Whether another request may be sent: no answer is outstanding."""
        return not (self._unanswered or self.ends or self.wire.has_unread)

    @property
    def is_closed(self) -> bool:
        """Whether the server closed the idle connection, or sent bytes without a request."""
        poll = select.poll()
        poll.register(self.wire.socket.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.wire.close()

    async def request(
        self,
        method: bytes,
        path: str,
        headers: list[tuple[bytes, bytes]] | None = None,
        body: bytes = b"",
    ) -> None:
        self._unanswered += 1
        await self.wire.send(messages.request_head(self.root, method, path, headers) + body)

    async def request_blobs(self, digests: list[bytes]) -> None:
        self._unanswered += len(digests)
        await self.wire.send(
            b"".join([messages.blob_request(self.root, digest) for digest in digests])
        )

    async def receive_blob(self, reference: BlobReference, sink: Sink) -> Piece:
        """Receive the answer to the oldest GET of a blob; raises `FetchError`."""
        size = await self.wire.plain_blob(reference.size_bytes, sink.write)
        if size >= 0:
            self._check_size(size, reference)
        else:
            status, size = await self.response()
            if status != 200:
                raise await self.refusal(status, size)
            self._check_size(size, reference)
            await self.wire.body(size, sink.write)
        self._unanswered -= 1
        return sink.finish()

    def _check_size(self, size: int, reference: BlobReference) -> None:
        if size != reference.size_bytes:
            raise FetchError(
                f"{self.root} offers {size} bytes of a blob of {reference.size_bytes}", lacks=True
            )

    async def response(self) -> tuple[int, int]:
        """Receive a head (or 100 Continue): status and Content-Length. Raises `FetchError`."""
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=limits.HEAD_BYTES_MAX)
        # h11 parses an answer only after a request; the bytes of this one are never sent.
        parser.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        head = await self.wire.head(parser, limits.STALL_SECONDS)
        if isinstance(head, h11.InformationalResponse):
            return head.status_code, 0
        assert isinstance(head, h11.Response)
        headers = {bytes(name): bytes(value) for name, value in head.headers}
        closes = b"close" in headers.get(b"connection", b"").lower()
        if closes or head.http_version < b"1.1" or b"transfer-encoding" in headers:
            self.ends = True
        if head.status_code == 204:
            return 204, 0
        size = headers.get(b"content-length", b"")
        if size.isdigit() and len(size) < 16:
            return head.status_code, int(size)
        if head.status_code == 200:
            raise FetchError(f"{self.root} does not say how many bytes it sends")
        self.ends = True
        return head.status_code, 0

    async def small_answer(self, size: int, bytes_max: int = limits.HEAD_BYTES_MAX) -> bytes:
        """Receive `size` bytes, or only `bytes_max` of more: then the connection is not kept."""
        body = await self.wire.small_body(min(size, bytes_max))
        if size <= bytes_max:
            self._unanswered -= 1
        return body

    async def refusal(self, status: int, size: int) -> FetchError:
        """The error for an answer that refuses, with the reason in its body."""
        if status < 200:
            self.ends = True  # the answer itself is still to come
        body = await self.small_answer(size, REASON_BYTES_MAX)
        reason = body.decode("utf-8", "replace").splitlines()[:1] or [""]
        return refusal(self.root, status, "".join(filter(str.isprintable, reason[0])))


POOL_PER_SOURCE = 4
"""Idle connections kept to one source; more are closed after use."""

LOOK_SECONDS = 1.0
"""Between two checks of all idle connections."""

UNREACHABLE_SECONDS = 60.0
"""A root that did not answer is skipped for this long if the source can be reached otherwise."""

ROOTS_KNOWN_MAX = 4096
"""Roots whose round trip or lack of an answer is remembered."""

_Key = tuple[str, PeerId | None, bytes]
"""Root, the peer behind it, and the credential shown to it."""


class BulkClient:
    """Fetches and pushes on kept-alive connections, to peers with this peer's identity proved. A
    root is `http://host:port`, with the peer behind it, or None for a mirror. Asking one raises
    `FetchError`, and `Unreachable` after `connect_seconds` without a connection."""

    def __init__(
        self,
        identity: Identity,
        disk: Disk,
        credential: Callable[[], bytes],
        traffic: Traffic,
        uplink: Uplink | None = None,
    ) -> None:
        """`uplink` limits the rate of pushes; None: no limit."""
        self._uplink = uplink or Uplink()
        self._disk = disk
        self._identity = identity
        self._credential = credential
        self._traffic = traffic
        self.tls: ssl.SSLContext | None = None
        """Verifies https mirrors; the system's default context, made on first use."""
        self._buffers = Buffers()
        self._idle: dict[_Key, list[tuple[Connection, float]]] = {}
        """Idle connections, each with the time since when it is idle."""
        self._looked_at = 0.0
        self._round_trips: Recent[str, float] = Recent(ROOTS_KNOWN_MAX)
        """By root: the shortest time that connecting took, in seconds."""
        self._unreachable: Recent[tuple[str, PeerId | None], float] = Recent(ROOTS_KNOWN_MAX)
        """Roots that did not answer, and the time of the last attempt."""

    async def fetch_run(
        self,
        root: str,
        peer: PeerId | None,
        wanted: Sequence[tuple[BlobReference, Sink]],
        arrived: Arrived,
        *,
        connect_seconds: float = limits.CONNECT_SECONDS,
    ) -> None:
        """GET several blobs on one connection, a mirror's one by one since some mishandle pipelined
        requests. `Unreachable` is raised only before the first."""
        async with self.connection(root, peer, connect_seconds) as connection:
            if peer is not None:
                await connection.request_blobs([reference.digest for reference, _ in wanted])
            for reference, sink in wanted:
                if peer is None:
                    await connection.request_blobs([reference.digest])
                await arrived(await connection.receive_blob(reference, sink))

    async def document(self, root: str, path: str, bytes_max: int) -> bytes:
        async with self.connection(root, None, limits.CONNECT_SECONDS) as connection:
            await connection.request(b"GET", path)
            status, size = await connection.response()
            if status != 200:
                raise await connection.refusal(status, size)
            if size > bytes_max:
                raise FetchError(f"{root}{path} has {size} bytes, more than {bytes_max}")
            return await connection.small_answer(size, bytes_max)

    async def push(
        self,
        root: str,
        peer: PeerId | None,
        reference: BlobReference,
        path: str,
        *,
        connect_seconds: float = limits.CONNECT_SECONDS,
    ) -> None:
        """PUT the local file `path`."""
        size = self._disk.size_bytes(path)
        if size != reference.size_bytes:
            raise FetchError(f"{path} has {size} bytes, not {reference.size_bytes}")
        async with self.connection(root, peer, connect_seconds) as connection:
            headers = [(b"content-length", b"%d" % size), (b"expect", b"100-continue")]
            await connection.request(b"PUT", f"/blob/{reference.digest.hex()}", headers)
            status, length = await connection.response()
            if status == 100:
                file = self._disk.local_path(path)
                try:
                    await connection.wire.send_file(file, 0, size, self._uplink)
                except Broken as broken:
                    # The target may have sent a reason before it closed; if not, `response` raises.
                    log.debug("%s %s", root, broken)
                    connection.ends = True
                status, length = await connection.response()
            else:
                connection.ends = True  # the server may still wait for the body
            if status not in (200, 201, 204):
                raise await connection.refusal(status, length)
            await connection.small_answer(length)

    @asynccontextmanager
    async def connection(
        self, root: str, peer: PeerId | None, connect_seconds: float
    ) -> AsyncIterator[Connection]:
        """A connection with our identity proved, kept if every answer on it was complete."""
        key = (root, peer, self._credential() if peer else b"")
        connection = self._reuse(key) or await self._open(root, peer, key[2], connect_seconds)
        try:
            yield connection
        except Broken as error:
            raise FetchError(f"{root} {error}") from error
        except h11.RemoteProtocolError as error:
            raise FetchError(f"{root} speaks no HTTP: {error}") from error
        finally:
            idle = len(self._idle.get(key, ()))
            if connection.can_be_kept:
                self._unreachable.pop((root, peer), None)
            if connection.can_be_kept and idle < POOL_PER_SOURCE:
                self._idle.setdefault(key, []).append((connection, trio.current_time()))
            else:
                connection.close()

    def close(self) -> None:
        for connections in self._idle.values():
            for connection, _ in connections:
                connection.close()
        self._idle.clear()

    def may_reach(self, root: str, peer: PeerId | None) -> bool:
        """False for a minute after a root did not answer."""
        since = self._unreachable.get((root, peer))
        return since is None or trio.current_time() - since > UNREACHABLE_SECONDS

    def forget(self, peer: PeerId) -> None:
        """Forget which roots of a peer were unreachable: the peer has come back."""
        for key in [key for key in self._unreachable if key[1] == peer]:
            del self._unreachable[key]

    def round_trip_seconds(self, roots: Sequence[str]) -> float:
        """The shortest round trip to any of these roots; 0 if none was measured."""
        known = (self._round_trips[root] for root in roots if root in self._round_trips)
        return min(known, default=0.0)

    def _reuse(self, key: _Key) -> Connection | None:
        now = trio.current_time()
        if now - self._looked_at > LOOK_SECONDS:
            self._looked_at = now
            self._drop_stale(now)
        idle = self._idle.get(key, [])
        while idle:
            connection, _ = idle.pop()
            if not connection.is_closed:
                return connection
            connection.close()
        return None

    def _drop_stale(self, now: float) -> None:
        for key in list(self._idle):
            for connection, since in list(self._idle[key]):
                if now - since > limits.IDLE_SECONDS / 2 or connection.is_closed:
                    self._idle[key].remove((connection, since))
                    connection.close()
            if not self._idle[key]:
                del self._idle[key]

    async def _open(
        self, root: str, peer: PeerId | None, credential: bytes, connect_seconds: float
    ) -> Connection:
        """Connect and prove our identity in `connect_seconds`; raises `Unreachable`,
        `FetchError`."""
        with trio.move_on_after(connect_seconds):
            stream = await self._connect(root, peer)
            connection = Connection(Wire(stream, self._traffic, self._buffers), root)
            try:
                if peer is not None:
                    await self._prove(connection, peer, credential)
            except BaseException as error:
                connection.close()
                if isinstance(error, Broken):
                    raise messages.Unreachable(f"{root} {error}") from error
                if isinstance(error, h11.RemoteProtocolError):
                    raise messages.Unreachable(f"{root} speaks no HTTP: {error}") from error
                raise
            return connection
        self._unreachable[root, peer] = trio.current_time()
        raise messages.Unreachable(f"{root} cannot be reached: no answer in time")

    async def _connect(
        self, root: str, peer: PeerId | None
    ) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
        host, port, secure = messages.split_root(root)
        began = trio.current_time()
        try:
            stream = await trio.open_tcp_stream(host, port)
            seconds = trio.current_time() - began
            self._round_trips[root] = min(seconds, self._round_trips.get(root, seconds))
            return await self._secured(stream, host) if secure else stream
        except (OSError, UnicodeError, trio.BrokenResourceError) as error:
            self._unreachable[root, peer] = trio.current_time()
            raise messages.Unreachable(f"{root} cannot be reached: {_why(error)}") from error

    async def _secured(
        self, stream: trio.SocketStream, host: str
    ) -> trio.SSLStream[trio.SocketStream]:
        if self.tls is None:
            self.tls = ssl.create_default_context()
        secured = trio.SSLStream(stream, self.tls, server_hostname=host, https_compatible=True)
        try:
            await secured.do_handshake()
        except BaseException:
            stream.socket.close()
            raise
        return secured

    async def _prove(self, connection: Connection, peer: PeerId, credential: bytes) -> None:
        await connection.request(b"GET", "/challenge")
        status, size = await connection.response()
        if status in BUSY_STATUSES:
            raise await self._full(connection, status, size)
        challenge = await connection.small_answer(size)
        if status != 200 or len(challenge) != messages.CHALLENGE_BYTES:
            return  # a plain web server in front of the peer: needs no proof, or will refuse
        signature = self._identity.sign(messages.proof_message(peer, challenge))
        proof = messages.encode(messages.Proof(self._identity.peer_id, signature, credential))
        headers = [(b"content-length", b"%d" % len(proof))]
        await connection.request(b"POST", "/admission", headers, proof)
        status, size = await connection.response()
        if status == messages.MISDIRECTED:
            self._unreachable[connection.root, peer] = trio.current_time()
            raise messages.Unreachable(f"{connection.root} is another peer's here")
        if status in BUSY_STATUSES:
            raise await self._full(connection, status, size)
        if status != 204:
            raise await connection.refusal(status, size)
        await connection.small_answer(size, 0)

    async def _full(self, connection: Connection, status: int, size: int) -> messages.Unreachable:
        """The error for a server without room for this connection: a stream may carry the blob."""
        refusal = await connection.refusal(status, size)
        return messages.Unreachable(str(refusal), retry=refusal.retry, busy=refusal.busy)


def _why(error: BaseException) -> str:
    """The cause of a failed connection; of several attempts, the first."""
    cause = error.__cause__ or error
    if isinstance(cause, ExceptionGroup):
        cause = cause.exceptions[0]
    if isinstance(cause, OSError) and cause.strerror:
        # trio puts the address before the reason; the caller names it already.
        return cause.strerror.rpartition("): ")[2]
    return str(cause)
