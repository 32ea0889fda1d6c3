"""Connections of an ASGI server (dashboard, endpoint): at most so many, and all of them HTTP/1.1,
since hypercorn does not close idle ones of HTTP/2."""

import socket
from contextlib import suppress
from math import inf

import trio
from h11 import Request
from hypercorn.config import Config
from hypercorn.events import Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState
from hypercorn.utils import wrap_app

CONNECTIONS_MAX = 512
"""Connections at a time. Of more, the one whose client has let it wait for longest is closed. Most
systems let a process have 1,024 files."""

HEADERS_BYTES_MAX = 16 << 10
IDLE_CONNECTION_SECONDS = 20


class _Connection(TCPServer):
    """A connection that stays HTTP/1.1."""

    waits_since: float = inf
    """When it began to wait for its client: for a request, or for it to take what is sent. Infinite
    while the application works."""

    async def run(self) -> None:
        self.waits_since = trio.current_time()
        await super().run()

    def drop(self) -> None:
        """Close it at once, whatever it waits for: hypercorn shields its sending from a cancel."""
        self.stream.socket.close()

    async def protocol_send(self, event: Event) -> None:
        before = self.waits_since
        if isinstance(event, Updated):
            before = trio.current_time() if event.idle else inf
        elif isinstance(event, RawData):
            self.waits_since = trio.current_time()
        try:
            await super().protocol_send(event)
        finally:
            self.waits_since = before

    async def _read_data(self) -> None:
        protocol = self.protocol.protocol
        assert isinstance(protocol, H11Protocol)
        protocol._check_protocol = _stay  # type: ignore[method-assign, assignment]
        with suppress(_OtherProtocol):
            await super()._read_data()
        await self.idle_task.stop()  # else a client that has gone counts until it would idle


class _OtherProtocol(Exception):
    """The client has begun with HTTP/2 and takes no other answer."""


async def _stay(request: Request) -> None:
    """Replaces hypercorn's changes of protocol; a wish to upgrade is ignored."""
    if request.http_version not in (b"1.0", b"1.1"):
        raise _OtherProtocol


async def serve_connections(
    app: ASGIFramework,
    listener: socket.socket,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an application until cancelled; then all connections are closed at once."""
    config = Config()
    config.errorlog = None  # the application prints what failed
    config.include_server_header = False
    config.h11_max_incomplete_size = HEADERS_BYTES_MAX
    config.keep_alive_timeout = IDLE_CONNECTION_SECONDS
    wrapped = wrap_app(app, config.wsgi_max_body_size, "asgi")
    context = WorkerContext(None)
    connections: set[_Connection] = set()

    async def handle(stream: trio.SocketStream) -> None:
        if len(connections) >= CONNECTIONS_MAX:
            waiting = min(connections, key=lambda each: each.waits_since)
            if waiting.waits_since == inf:
                return
            connections.discard(waiting)
            waiting.drop()
        connection = _Connection(wrapped, config, context, ConnectionState({}), stream)  # type: ignore[arg-type]
        connections.add(connection)
        try:
            await connection
        finally:
            connections.discard(connection)

    listening = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, handle, [listening])
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            for connection in connections:
                connection.drop()
