"""Serves a peer's figures to Prometheus: `GET /metrics`, one request per connection."""

import hmac
import logging
import socket
from contextlib import suppress
from pathlib import Path

import h11
import trio

from swarm.look.health import Pulse
from swarm.node.node import Node
from swarm.settings import PeerSettings
from swarm.transport import Traffic
from swarm.transport.http import limits
from swarm.transport.http.local_server import (
    is_addressed_as_loopback,
    open_listener,
    required_keys,
    url_of,
)
from swarm.transport.http.messages import answer_head
from swarm.transport.http.pace import Broken
from swarm.transport.http.wire import Buffers, Wire

log = logging.getLogger(__name__)

PATH = b"/metrics"

CONNECTIONS_MAX = 16
"""Connections at once: each costs a socket, and a scraper needs one. A further one ends the oldest,
whose client lets it wait: the answer itself takes no time."""

LINGER_SECONDS = 1.0
LINGER_BYTES_MAX = 64 * 1024
"""What is read after an answer until the client closes: see `_linger`."""


class MetricsServer:
    """Answers scrapers at the address of the setting `metrics`, from `serve` on."""

    def __init__(self, settings: PeerSettings) -> None:
        """Listen; raises `UserError` for a wrong address, a taken port or a missing key."""
        keys = Path(settings.metrics_key_file) if settings.metrics_key_file else None
        self._keys = required_keys(settings.metrics, keys, "metrics", "metrics_key_file")
        from swarm.look.metrics.figures import Figures  # 1.5 MiB: only for those who ask

        self._listener: socket.socket = open_listener(settings.metrics, "metrics")
        self._figures = Figures(settings.role)
        self._buffers = Buffers()
        self._traffic = Traffic()  # apart from the peer's own, which is a figure
        self._connections: dict[trio.CancelScope, None] = {}
        """The oldest first."""

    @property
    def url(self) -> str:
        return url_of(self._listener)

    def close(self) -> None:
        self._listener.close()

    async def serve(self, node: Node, pulse: Pulse) -> None:
        """Count the node's events and answer scrapers until cancelled."""
        self._figures.watch(
            node.transport.traffic,
            ready=lambda: pulse.ready,
            peers=lambda: len(node.transport.connected()),
        )
        node.events.add_sink(self._figures)
        node.events.emit("peer.metrics", url=f"{self.url}{PATH.decode()}")
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listener))
        await trio.serve_listeners(self._connection, [listener])

    async def _connection(self, stream: trio.SocketStream) -> None:
        wire = Wire(stream, self._traffic, self._buffers)
        while len(self._connections) >= CONNECTIONS_MAX:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        with trio.CancelScope() as scope:
            self._connections[scope] = None
            try:
                await self._answer(wire)
                await _linger(stream)
            except Broken as broken:
                log.debug("scraper %s", broken)
            except Exception:  # a defect here must not stop the peer
                log.exception("serving metrics failed")
            finally:
                self._connections.pop(scope, None)
                wire.close()

    async def _answer(self, wire: Wire) -> None:
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.HEAD_BYTES_MAX)
        try:
            request = await wire.head(parser, limits.HEAD_SECONDS)
        except h11.RemoteProtocolError as error:
            await _reply(wire, 400, str(error).encode("ascii", "replace"))
            return
        assert isinstance(request, h11.Request)
        headers = {bytes(name): bytes(value) for name, value in request.headers}
        if not self._keys and not is_addressed_as_loopback(
            headers.get(b"host", b"").decode("latin-1")
        ):
            await _reply(wire, 403, b"without a key only 127.0.0.1, [::1] and localhost are served")
        elif self._keys and not self._has_key(headers):
            await _reply(wire, 401, b"the key is missing or wrong; send Authorization: Bearer KEY")
        elif bytes(request.target).partition(b"?")[0] != PATH:
            await _reply(wire, 404, b"only " + PATH)
        elif request.method not in (b"GET", b"HEAD"):
            await _reply(wire, 405, b"only GET and HEAD")
        else:
            from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

            body = generate_latest(self._figures.registry)
            kind = CONTENT_TYPE_PLAIN_0_0_4.encode("ascii")
            await _reply(wire, 200, body, kind, head_only=request.method == b"HEAD")

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = key.strip() if scheme.lower() == b"bearer" else b""
        return any(hmac.compare_digest(given, each.encode("utf-8")) for each in self._keys)


async def _linger(stream: trio.SocketStream) -> None:
    """Read what the client still sends. Bytes left unread would make the system reset the
    connection, and the client could lose the answer."""
    with trio.move_on_after(LINGER_SECONDS), suppress(trio.BrokenResourceError):
        await stream.send_eof()
        read = 0
        while read < LINGER_BYTES_MAX and (data := await stream.receive_some(4096)):
            read += len(data)


async def _reply(
    wire: Wire,
    status: int,
    body: bytes,
    kind: bytes = b"text/plain; charset=utf-8",
    *,
    head_only: bool = False,
) -> None:
    head = answer_head(status, len(body), kind, close=True)
    await wire.send(head if head_only else head + body)
