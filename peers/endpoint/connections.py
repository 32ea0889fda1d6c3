"""The endpoint's connections: at most so many, and all of them HTTP/1.1.

hypercorn would let a client change to HTTP/2, whose connections it does not close when they idle.
"""

from __future__ import annotations

import socket
from contextlib import suppress

import trio
from h11 import Request
from hypercorn.config import Config
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState
from hypercorn.utils import wrap_app

CONNECTIONS_MAX = 512
"""Connections at a time; a further one is closed. Most systems let a process have 1,024 files."""


HEADERS_BYTES_MAX = 16 << 10
IDLE_CONNECTION_SECONDS = 20


class _Connection(TCPServer):
    """A connection that stays HTTP/1.1."""

    async def _read_data(self) -> None:
        protocol = self.protocol.protocol
        assert isinstance(protocol, H11Protocol)
        protocol._check_protocol = _stay  # type: ignore[method-assign, assignment]
        with suppress(_OtherProtocol):
            await super()._read_data()


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
    """Serve an application until cancelled."""
    config = Config()
    config.errorlog = None  # the application prints what failed
    config.include_server_header = False
    config.h11_max_incomplete_size = HEADERS_BYTES_MAX
    config.keep_alive_timeout = IDLE_CONNECTION_SECONDS
    wrapped = wrap_app(app, config.wsgi_max_body_size, "asgi")
    context = WorkerContext(None)
    count = 0

    async def handle(stream: trio.SocketStream) -> None:
        nonlocal count
        if count >= CONNECTIONS_MAX:
            await stream.aclose()
            return
        count += 1
        try:
            await _Connection(wrapped, config, context, ConnectionState({}), stream)  # type: ignore[arg-type]
        finally:
            count -= 1

    listening = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, handle, [listening])
        task_status.started()
