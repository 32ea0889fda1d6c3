"""The piece server: HTTP connections, their requests, and the limits of clients."""

from __future__ import annotations

import logging
import secrets
from collections import Counter

import h11
import trio

from swarm.envelope import ENVELOPE_BYTES_MAX
from swarm.errors import DECODE_ERRORS, DiskFullError
from swarm.identity import PeerId, verify
from swarm.rates import TokenBuckets
from swarm.transport import BlobReference, BulkService, Refused
from swarm.transport.http import limits
from swarm.transport.http.messages import (
    BLOB_PATH,
    CHALLENGE_BYTES,
    MISDIRECTED,
    answer_head,
    decode_proof,
    last_head,
    proof_message,
)
from swarm.transport.http.pace import Broken
from swarm.transport.http.serving import FinalRefusal, Serving, commit_push
from swarm.transport.http.wire import Buffers, Wire
from swarm.world import Sink

PROOF_BYTES_MAX = ENVELOPE_BYTES_MAX + 1024
"""Room for an admission envelope, a peer id and a signature."""

CONNECTIONS_MAX = 2048
"""Connections one server holds: each costs a socket and a task. A worker keeps the one that it
delivered on for half a minute, so a validator of 4,000 workers holds some 700."""

CONNECTIONS_OF_STRANGERS_MAX = 512
"""Of these, connections without a proof of identity."""

CONNECTIONS_PER_ADDRESS_MAX = 64
"""Connections from one IP address without a proof of identity. Peers that proved theirs are bounded
each, so that hundreds behind one address are served."""

CONNECTIONS_PER_PEER_MAX = 32
"""Connections on which one peer has proved its identity: an honest peer needs about four."""

SMALL_REQUESTS_PER_SECOND = 100.0
"""Requests that move no blob (proofs, refusals, heads), per address and per peer; more must wait.
A peer that waits for a piece asks at most 20 times a second on a connection."""

SMALL_REQUESTS_BURST = 400.0
"""Small requests at once: a hundred peers behind one address that connect after a checkpoint."""

CLIENTS_KNOWN_MAX = 4096
"""Addresses and peers whose small requests are remembered; the least recent is forgotten."""


class Clients:
    """Counts connections per peer, and limits small requests per address and per peer."""

    def __init__(self) -> None:
        self._connections: Counter[PeerId] = Counter()
        self._small_requests = TokenBuckets(
            SMALL_REQUESTS_PER_SECOND, SMALL_REQUESTS_BURST, CLIENTS_KNOWN_MAX
        )

    def enter(self, peer: PeerId) -> bool:
        """Count a connection on which a peer proved its identity; False if it has too many."""
        if self._connections[peer] >= CONNECTIONS_PER_PEER_MAX:
            return False
        self._connections[peer] += 1
        return True

    def leave(self, peer: PeerId) -> None:
        self._connections[peer] -= 1
        if not self._connections[peer]:
            del self._connections[peer]

    async def wait_turn(self, name: str) -> None:
        """Wait until an address or peer may make its next small request.

        A flood of challenges, wrong proofs or unknown names slows only its sender.
        """
        now = trio.current_time()
        bucket = self._small_requests.of(name)
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
        self.host = host
        self._client: PeerId | None = None
        self._credential = b""
        self._challenge: bytes | None = None
        self._admitted_at: float | None = None
        """When this client was last found to be admitted; None: it was not."""

    @property
    def proven(self) -> bool:
        """Whether an admitted peer proved its identity on this connection."""
        return self._client is not None

    def end(self) -> None:
        """Stop counting this connection as its client's."""
        if self._client is not None:
            self._clients.leave(self._client)
            self._client = None

    async def run(self) -> None:
        close = False
        while not close:
            digest = await self._wire.plain_get(limits.IDLE_SECONDS)
            if digest is not None:
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
                await self._wire.send(last_head(400) + str(error).encode("ascii", "replace"))
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
                raise Refused(411, "send a Content-Length")
            method, target = bytes(request.method), bytes(request.target)
            if target in self._pages and method == b"GET" and not body_left:
                await self._small_request()
                await self._reply(200, self._pages[target])
            elif target == b"/challenge" and method == b"GET" and not body_left:
                await self._small_request()
                self._challenge = secrets.token_bytes(CHALLENGE_BYTES)
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
                match = BLOB_PATH.fullmatch(target)
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
        await self._clients.wait_turn(self.host)
        if self._client is not None:
            await self._clients.wait_turn(self._client)

    def _prove(self, body: bytes) -> None:
        challenge, self._challenge = self._challenge, None
        if challenge is None:
            raise FinalRefusal(403, "ask for a challenge first")
        try:
            proof = decode_proof(body)
        except DECODE_ERRORS as error:
            raise FinalRefusal(400, "that is no proof") from error
        message = proof_message(self._serving.peer_id, challenge)
        if not verify(proof.peer, message, proof.signature):
            raise FinalRefusal(MISDIRECTED, "the proof is for another peer")
        peer = PeerId(proof.peer)
        if not self._serving.service().admits(peer, proof.credential):
            raise FinalRefusal(403, "this peer is not admitted")
        self.end()  # the connection may already count as this peer's or another's
        if not self._clients.enter(peer):
            raise FinalRefusal(503, "too many connections of this peer")
        self._client, self._credential = peer, proof.credential
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
            head = answer_head(200, blob.size_bytes, b"application/octet-stream")
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
        await self._wire.send(answer_head(status, len(body), kind, close=close) + body)


log = logging.getLogger(__name__)


class BulkServer:
    """Answers the HTTP plane for one peer."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._clients = Clients()
        self._buffers = Buffers()
        self._sessions: set[Session] = set()

    async def serve(self, listeners: list[trio.SocketListener]) -> None:
        """Accept until cancelled."""
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
            if not self._has_room(host):
                await wire.send(last_head(503) + b"too many connections")
                return
            self._sessions.add(session)
            try:
                await session.run()
            finally:
                session.end()
        except Broken as broken:
            log.debug("bulk client %s %s", host, broken)
        except Exception:  # a defect here must not let a stranger stop this peer
            log.exception("serving the bulk plane to %s failed", host)
        finally:
            self._sessions.discard(session)
            wire.close()

    def _has_room(self, host: str) -> bool:
        """Whether a connection from this address may be served."""
        strangers = [session.host for session in self._sessions if not session.proven]
        return (
            len(self._sessions) < CONNECTIONS_MAX
            and len(strangers) < CONNECTIONS_OF_STRANGERS_MAX
            and strangers.count(host) < CONNECTIONS_PER_ADDRESS_MAX
        )
