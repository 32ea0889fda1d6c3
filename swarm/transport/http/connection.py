"""The client's side of one HTTP connection: requests, and the answers to them."""

from __future__ import annotations

import select

import h11

from swarm.transport import BlobReference, FetchError, refusal
from swarm.transport.http import limits
from swarm.transport.http.messages import blob_request, request_head
from swarm.transport.http.wire import Wire
from swarm.world import Piece, Sink

REASON_BYTES_MAX = 200
"""Bytes read of a refusal's reason. After a longer one the connection is not used again."""


class Connection:
    """A connection to one root. Every method may also raise `Broken` and
    `h11.RemoteProtocolError`."""

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
        await self.wire.send(request_head(self.root, method, path, headers) + body)

    async def request_blobs(self, digests: list[bytes]) -> None:
        """GET several blobs at once."""
        self._unanswered += len(digests)
        await self.wire.send(b"".join([blob_request(self.root, digest) for digest in digests]))

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
        """Receive the next head (100 Continue included): its status and Content-Length.

        Raises `FetchError`.
        """
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
        """Receive a body of `size` bytes.

        Of a longer one, only the first `bytes_max`: then the connection is not kept.
        """
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
