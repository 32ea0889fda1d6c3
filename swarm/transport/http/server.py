"""The piece server: HTTP connections, their requests, and the limits of clients."""

import logging
import math
import secrets

import h11
import trio

from swarm.errors import DECODE_ERRORS, DiskFullError
from swarm.transport import BlobReference, BulkService, Refused
from swarm.transport.http import limits, messages
from swarm.transport.http.pace import Broken
from swarm.transport.http.serving import FinalRefusal, Serving, Table, commit_push
from swarm.transport.http.wire import Buffers, Wire
from swarm.transport.rates import TokenBuckets
from swarm.transport.room import Caller, NoRoom, Sizes, origin_of
from swarm.wire.envelope import ENVELOPE_BYTES_MAX
from swarm.wire.identity import PeerId, verify
from swarm.world import Sink

PROOF_BYTES_MAX = ENVELOPE_BYTES_MAX + 1024
"""Room for an admission envelope, a peer id and a signature."""

CONNECTIONS_MAX = 2048
"""Connections one server holds: each costs a socket and a task. A worker keeps the one that it
delivered on for half a minute, so a validator of 4,000 workers holds some 700."""

CONNECTIONS_OF_STRANGERS_MAX = 512
"""Of these, connections without a proof of identity."""

CONNECTIONS_FOR_STRANGERS = 128
"""Connections left to those who have yet to prove their identity, however many are admitted."""

CONNECTIONS_PER_ADDRESS_MAX = 64
"""Connections from one IP address (IPv6: a /64) without a proof of identity. Peers that proved
theirs are bounded each, so that hundreds behind one address are served."""

CONNECTIONS_PER_PEER_MAX = 32
"""Connections on which one peer has proved its identity: an honest peer needs about four."""

HANDSHAKES_MAX = 512
"""Connections without a complete request so far: as many as strangers have. Silent ones cost least
while they are left alone until others need their places."""

HANDSHAKES_PER_SECOND = 64.0
"""Connections without a proof of identity from one /24 (IPv6: /48), on average."""

HANDSHAKES_BURST = 512.0
"""The same at once. Clients of a mirror prove nothing."""

SMALL_REQUESTS_PER_SECOND = 100.0
"""Requests that move no blob (proofs, refusals, heads), per address and per peer; more must wait.
A peer that waits for a piece asks at most 20 times a second on a connection."""

SMALL_REQUESTS_BURST = 400.0
"""Small requests at once: a hundred peers behind one address that connect after a checkpoint."""

CLIENTS_KNOWN_MAX = 4096
"""Addresses and peers whose small requests are remembered; the least recent is forgotten."""


class Clients:
    """Bounds connections, and limits small requests per address and per peer."""

    def __init__(self) -> None:
        self.table = Table(
            Sizes(
                CONNECTIONS_MAX,
                CONNECTIONS_OF_STRANGERS_MAX,
                CONNECTIONS_FOR_STRANGERS,
                CONNECTIONS_PER_ADDRESS_MAX,
                HANDSHAKES_MAX,
                HANDSHAKES_PER_SECOND,
                HANDSHAKES_BURST,
            ),
            CONNECTIONS_PER_PEER_MAX,
        )
        self._small_requests = TokenBuckets(
            SMALL_REQUESTS_PER_SECOND, SMALL_REQUESTS_BURST, CLIENTS_KNOWN_MAX
        )

    async def wait_turn(self, name: str) -> None:
        """Wait for a turn to make a small request: a flood of them slows only its sender."""
        bucket, now = self._small_requests.of(name), trio.current_time()
        seconds = bucket.debt_seconds(now)
        bucket.borrow(1, now)
        if seconds:
            await trio.sleep(seconds)


class Session:
    """Answers the requests of one HTTP connection, one after the other."""

    def __init__(self, serving: Serving, clients: Clients, wire: Wire, host: str) -> None:
        self._serving = serving
        self._clients = clients
        self._pages = serving.pages
        self._wire = wire
        self.origin = origin_of(host)
        self._client: PeerId | None = None
        self._credential = b""
        self._challenge: bytes | None = None
        self._admitted_at: float | None = None
        """When this client was last found to be admitted; None: it was not."""
        self._caller = Caller(self.origin)
        """Requests are received and answered in its scope."""
        self._rests = True
        """Whether no request has come since the last answer, or since the connection began."""
        self.used_at = trio.current_time()
        self.leaving = False

    # --- `swarm.transport.http.serving.Guest` ---

    @property
    def peer(self) -> str:
        """The admitted peer that proved its identity on this connection; empty if none did."""
        return self._client or ""

    @property
    def vouched(self) -> bool:
        return self._client is not None

    @property
    def trusted(self) -> bool:
        return self._client is not None and self._serving.trusts(self._client)

    @property
    def idle(self) -> bool:
        return self._rests and trio.current_time() - self.used_at >= limits.GRACE_SECONDS

    def leave(self) -> None:
        self.leaving = True
        self._caller.handshake.cancel()

    def end(self) -> None:
        self._client = None

    # --- requests ---

    async def run(self, caller: Caller | None = None) -> None:
        """Answer requests until the connection ends; `caller` is its place in the table."""
        if caller is not None:
            self._caller = caller
        with self._caller.handshake:
            await self._run()

    async def _run(self) -> None:
        close = False
        while not close:
            self._rest()
            digest = await self._wire.plain_get(limits.IDLE_SECONDS)
            if digest is not None:
                self._work()
                try:
                    page = self._pages.get(b"/blob/" + digest.hex().encode())
                    if page is not None:
                        await self._small_request()
                        await self._reply(200, page)
                    else:
                        await self._send_blob(digest, head_only=False)
                except Refused as refused:
                    close = isinstance(refused, FinalRefusal)
                    await self._refuse(refused, close=close)
                continue
            # A fresh parser each time: bodies bypass it, so it could not follow the connection.
            parser = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.HEAD_BYTES_MAX)
            try:
                request = await self._wire.head(parser, limits.IDLE_SECONDS)
            except h11.RemoteProtocolError as error:
                await self._wire.send(
                    messages.last_head(400) + str(error).encode("ascii", "replace")
                )
                return
            assert isinstance(request, h11.Request)
            if request.target == b"/admission" and not self.vouched:
                # Who sends no whole proof in time is still a stranger that has sent nothing.
                self._caller.shaking = False
            else:
                self._work()
            close = await self._answer(request)

    def _rest(self) -> None:
        self._rests, self.used_at = True, trio.current_time()
        seconds = math.inf if self.vouched else limits.STRANGER_SECONDS
        self._caller.handshake.deadline = self.used_at + seconds

    def _work(self) -> None:
        self._caller.shaking = False
        self._rests, self.used_at = False, trio.current_time()
        self._caller.handshake.deadline = math.inf

    async def _answer(self, request: h11.Request) -> bool:
        """Answer one request; True when the connection must end."""
        headers = {bytes(name): bytes(value) for name, value in request.headers}
        size = headers.get(b"content-length", b"0")
        length = int(size) if size.isdigit() and len(size) < 16 else -1
        close = headers.get(b"connection", b"").lower() == b"close" or request.http_version < b"1.1"
        body_left = length != 0 or b"transfer-encoding" in headers
        try:
            if b"transfer-encoding" in headers or length < 0:
                raise Refused(411, "send a Content-Length")
            method, target = bytes(request.method), bytes(request.target)
            if target in self._pages and method == b"GET" and not body_left:
                await self._small_request()
                await self._reply(200, self._pages[target])
            elif target == b"/challenge" and method == b"GET" and not body_left:
                await self._small_request()
                self._challenge = secrets.token_bytes(messages.CHALLENGE_BYTES)
                await self._reply(200, self._challenge)
            elif target == b"/admission" and method == b"POST":
                if length > PROOF_BYTES_MAX:
                    raise Refused(413, "the proof is too long")
                body = await self._wire.small_body(length)
                body_left = False
                await self._small_request()
                self._prove(body)
                await self._reply(204, b"")
            else:
                match = messages.BLOB_PATH.fullmatch(target)
                if match is None:
                    raise Refused(404, "no such path")
                digest = bytes.fromhex(match[1].decode("ascii"))
                if method in (b"GET", b"HEAD") and not body_left:
                    await self._send_blob(digest, head_only=method == b"HEAD")
                elif method == b"PUT":
                    service = self._check_admitted()
                    if length > limits.BLOB_BYTES_MAX:
                        raise Refused(413, f"at most {limits.BLOB_BYTES_MAX} bytes")
                    reference = BlobReference(digest, length)
                    sink = service.accept(self._client, reference)
                    expects = headers.get(b"expect", b"").lower() == b"100-continue"
                    await self._receive_blob(reference, sink, expects)
                    body_left = False
                    await self._reply(204, b"")
                else:
                    raise Refused(405, "only GET, HEAD and PUT")
        except Refused as refused:
            close = close or body_left or isinstance(refused, FinalRefusal)
            await self._refuse(refused, close=close)
        return close

    async def _refuse(self, refused: Refused, *, close: bool) -> None:
        await self._small_request()
        await self._reply(refused.status, refused.reason.encode("utf-8"), close=close)

    async def _small_request(self) -> None:
        """Wait for the turn of a request that moves no blob: by address, and by peer if known."""
        await self._clients.wait_turn(self.origin.address)
        if self._client is not None:
            await self._clients.wait_turn(self._client)

    def _prove(self, body: bytes) -> None:
        challenge, self._challenge = self._challenge, None
        if challenge is None:
            raise FinalRefusal(403, "ask for a challenge first")
        try:
            proof = messages.decode_proof(body)
        except DECODE_ERRORS as error:
            raise FinalRefusal(400, "that is no proof") from error
        message = messages.proof_message(self._serving.peer_id, challenge)
        if not verify(proof.peer, message, proof.signature):
            raise FinalRefusal(messages.MISDIRECTED, "the proof is for another peer")
        peer = PeerId(proof.peer)
        if not self._serving.service().admits(peer, proof.credential):
            raise FinalRefusal(403, "this peer is not admitted")
        self._client, self._credential = peer, proof.credential
        try:
            self._clients.table.prove(self)
        except NoRoom as full:
            self._client = None
            raise FinalRefusal(503, str(full)) from full
        self._admitted_at = trio.current_time()

    def _still_admitted(self) -> bool:
        return self._serving.service().admits(self._client, self._credential)

    def _check_admitted(self) -> BulkService:
        now = trio.current_time()
        if self._admitted_at is None or now - self._admitted_at > limits.ADMITTED_SECONDS:
            self._admitted_at = now if self._still_admitted() else None
        if self._admitted_at is None:
            # A new admission needs a new proof: the client makes one on its next connection.
            proved = self._client is not None
            text = "this peer is no longer admitted" if proved else "prove your identity first"
            raise FinalRefusal(403, text) if proved else Refused(403, text)
        return self._serving.service()

    async def _send_blob(self, digest: bytes, *, head_only: bool) -> None:
        blob = self._check_admitted().open(self._client, digest)
        try:
            path = self._serving.disk.local_path(blob.path)
            if not path.is_file():
                raise Refused(404, "the file of this blob was removed")
            head = messages.answer_head(200, blob.size_bytes, b"application/octet-stream")
            await self._wire.send(head, more=bool(blob.size_bytes) and not head_only)
            if head_only:
                await self._small_request()
            else:
                await self._wire.send_file(
                    path, blob.offset, blob.size_bytes, self._serving.uplink, self._still_admitted
                )
        finally:
            blob.release()

    async def _receive_blob(self, reference: BlobReference, sink: Sink, expects: bool) -> None:
        try:
            if expects:
                await self._wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            await self._wire.body(reference.size_bytes, sink.write, self._still_admitted)
            await commit_push(reference, sink)
        except BaseException as error:
            sink.abandon()
            if isinstance(error, DiskFullError):
                raise FinalRefusal(507, "no space left") from error
            raise

    async def _reply(self, status: int, body: bytes, *, close: bool = False) -> None:
        kind = b"application/octet-stream" if status == 200 else b"text/plain; charset=utf-8"
        await self._wire.send(messages.answer_head(status, len(body), kind, close=close) + body)


log = logging.getLogger(__name__)


class BulkServer:
    """Answers the HTTP plane for one peer."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._clients = Clients()
        self._buffers = Buffers()

    async def serve(self, listeners: list[trio.SocketListener]) -> None:
        await trio.serve_listeners(self._connection, listeners)

    async def _connection(self, stream: trio.SocketStream) -> None:
        try:
            host = str(stream.socket.getpeername()[0])
        except OSError:  # the client has disconnected already
            await trio.aclose_forcefully(stream)
            return
        wire = Wire(stream, self._serving.traffic, self._buffers)
        session = Session(self._serving, self._clients, wire, host)
        try:
            with self._clients.table.entered(session, host) as caller:
                try:
                    await session.run(caller)
                finally:
                    session.end()
        except NoRoom as full:
            await self._refuse(wire, str(full))
        except Broken as broken:
            log.debug("bulk client %s %s", host, broken)
        except Exception:  # a defect here must not let a stranger stop this peer
            log.exception("serving the bulk plane to %s failed", host)
        finally:
            wire.close()

    @staticmethod
    async def _refuse(wire: Wire, reason: str) -> None:
        try:
            await wire.send(messages.last_head(503) + reason.encode())
        except Broken as broken:
            log.debug("a refused client %s", broken)
