"""The server's side of one HTTP connection."""

from __future__ import annotations

import secrets

import h11
import trio

from swarm.envelope import ENVELOPE_BYTES_MAX
from swarm.errors import DECODE_ERRORS, DiskFullError
from swarm.identity import PeerId, verify
from swarm.transport import BlobReference, BulkService, OpenBlob, Refused
from swarm.transport.http import limits
from swarm.transport.http.clients import Clients
from swarm.transport.http.heads import BLOB_PATH, answer_head, last_head
from swarm.transport.http.messages import CHALLENGE_BYTES, decode_proof, proof_message
from swarm.transport.http.serving import Reply, Serving, commit_push
from swarm.transport.http.wire import Wire
from swarm.world import Sink

PROOF_BYTES_MAX = ENVELOPE_BYTES_MAX + 1024
"""Room for an admission envelope, a peer id and a signature."""


class Session:
    """Answers the requests of one HTTP connection, one after the other."""

    def __init__(self, serving: Serving, clients: Clients, wire: Wire, host: str) -> None:
        self._serving = serving
        self._clients = clients
        self._pages = serving.pages
        self._wire = wire
        self._host = host
        self._client: PeerId | None = None
        self._credential = b""
        self._challenge: bytes | None = None
        self._admitted_at: float | None = None
        """When this client was last found to be admitted; None: it was not."""

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
                except Reply as reply:
                    close = reply.close
                    await self._refuse(reply, close=close)
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
                raise Reply(411, "send a Content-Length")
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
                    raise Reply(413, "the proof is too long")
                body = await self._wire.small_body(length)
                body_left = False
                await self._small_request()
                self._prove(body)
                await self._reply(204, b"")
            else:
                match = BLOB_PATH.fullmatch(target)
                if match is None:
                    raise Reply(404, "no such path")
                digest = bytes.fromhex(match[1].decode("ascii"))
                if method in (b"GET", b"HEAD") and not body_left:
                    await self._send_blob(digest, head_only=method == b"HEAD")
                elif method == b"PUT":
                    service = self._check_admitted()
                    reference = BlobReference(digest, length)
                    sink = self._accept(service, reference)
                    expects = headers.get(b"expect", b"").lower() == b"100-continue"
                    await self._receive_blob(reference, sink, expects)
                    body_left = False
                    await self._reply(204, b"")
                else:
                    raise Reply(405, "only GET, HEAD and PUT")
        except Reply as reply:
            close = close or reply.close or body_left
            await self._refuse(reply, close=close)
        return close

    async def _refuse(self, reply: Reply, *, close: bool) -> None:
        await self._small_request()
        await self._reply(reply.status, reply.text.encode("utf-8"), close=close)

    async def _small_request(self) -> None:
        """Wait for the turn of a request that moves no blob: by address, and by peer if known."""
        await self._clients.wait_turn(self._host)
        if self._client is not None:
            await self._clients.wait_turn(self._client)

    def _prove(self, body: bytes) -> None:
        challenge, self._challenge = self._challenge, None
        if challenge is None:
            raise Reply(403, "ask for a challenge first", close=True)
        try:
            proof = decode_proof(body)
        except DECODE_ERRORS as error:
            raise Reply(400, "that is no proof", close=True) from error
        message = proof_message(self._serving.peer_id, challenge)
        if not verify(proof.peer, message, proof.signature):
            raise Reply(403, "the proof does not hold", close=True)
        peer = PeerId(proof.peer)
        if not self._serving.service().admits(peer, proof.credential):
            raise Reply(403, "this peer is not admitted", close=True)
        self.end()  # the connection may already count as this peer's or another's
        if not self._clients.enter(peer):
            raise Reply(503, "too many connections of this peer", close=True)
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
            raise Reply(403, text, close=proved)
        return self._serving.service()

    async def _send_blob(self, digest: bytes, *, head_only: bool) -> None:
        blob = self._open(self._check_admitted(), digest)
        try:
            path = self._serving.disk.local_path(blob.path)
            if not path.is_file():
                raise Reply(404, "the file of this blob was removed")
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

    def _open(self, service: BulkService, digest: bytes) -> OpenBlob:
        try:
            return service.open(self._client, digest)
        except Refused as refused:
            raise Reply(refused.status, refused.reason) from refused

    def _accept(self, service: BulkService, reference: BlobReference) -> Sink:
        if reference.size_bytes > limits.BLOB_BYTES_MAX:
            raise Reply(413, f"at most {limits.BLOB_BYTES_MAX} bytes")
        try:
            return service.accept(self._client, reference)
        except Refused as refused:
            raise Reply(refused.status, refused.reason) from refused

    async def _receive_blob(self, reference: BlobReference, sink: Sink, expects: bool) -> None:
        try:
            if expects:
                await self._wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            try:
                await self._wire.body(reference.size_bytes, sink.write, self._still_admitted)
                await commit_push(reference, sink)
            except DiskFullError as error:
                raise Reply(507, "no space left", close=True) from error
            except Refused as refused:
                raise Reply(refused.status, refused.reason) from refused
        except BaseException:
            sink.abandon()
            raise

    async def _reply(self, status: int, body: bytes, *, close: bool = False) -> None:
        kind = b"application/octet-stream" if status == 200 else b"text/plain; charset=utf-8"
        await self._wire.send(answer_head(status, len(body), kind, close=close) + body)
