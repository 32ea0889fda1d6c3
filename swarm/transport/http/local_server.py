"""HTTP servers for this machine's own programs: their listening sockets and bearer keys.

An error calls an option as `what` says, as the user writes it: `--listen`, or a key of a table.

Connections of an ASGI server (dashboard, endpoint): at most so many, and all of them HTTP/1.1.

hypercorn would let a client change to HTTP/2, whose connections it does not close when they idle.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import ip_address
from math import inf
from pathlib import Path

import trio
from h11 import Request
from hypercorn.config import Config
from hypercorn.events import Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState
from hypercorn.utils import wrap_app

from swarm.errors import UserError

STALLED_MS = 120_000
"""A connection whose client takes nothing of what was sent for so long is broken off."""

KEY_CHARACTERS_MIN = 16


def parse_listen(listen: str, what: str) -> tuple[str, int]:
    """Host and port of `host:port`; raises `UserError`."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UserError(
            f"{what} {listen!r} is no host:port, such as 127.0.0.1:8000 (ports go up to 65535)"
        )
    return "127.0.0.1" if host == "localhost" else host.strip("[]"), int(port)


def open_listener(listen: str, what: str = "--listen") -> socket.socket:
    """A listening socket at `host:port`; raises `UserError`."""
    host, port = parse_listen(listen, what)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(AttributeError, OSError):  # Linux has it; accepted sockets inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UserError(
            f"{what} {listen}: nothing can listen there ({error.strerror or error}); "
            "choose another address or port"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_addressed_as_loopback(header: str) -> bool:
    """Whether a Host header names this machine alone.

    A page in a browser on this machine reaches a server without a key by another name.
    """
    if header.startswith("["):
        return is_loopback(header.partition("]")[0] + "]")
    return is_loopback(header.partition(":")[0])


def required_keys(listen: str, path: Path | None, what: str, what_keys: str) -> frozenset[str]:
    """The keys in a file; raises `UserError` where one is needed and missing."""
    if path is None and not is_loopback(parse_listen(listen, what)[0]):
        raise UserError(
            f"{what} {listen} is reached from other machines, so a key is needed: write "
            "one into a file that only you can read (umask 077; head -c 32 /dev/urandom | base64 "
            f"> swarm.key) and name it with {what_keys}, or listen at 127.0.0.1"
        )
    return keys_in(path, what_keys)


def keys_in(path: Path | None, what: str) -> frozenset[str]:
    """The keys in a file, one a line; none without a file. Raises `UserError`."""
    if path is None:
        return frozenset()
    try:
        lines = path.expanduser().read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{what} {path} cannot be read (it is no text)") from error
    except OSError as error:
        raise UserError(f"{what} {path} cannot be read ({error.strerror})") from error
    keys = frozenset(line.strip() for line in lines if line.strip())
    if not keys or min(map(len, keys)) < KEY_CHARACTERS_MIN:
        raise UserError(
            f"{what} {path} must hold a key of at least {KEY_CHARACTERS_MIN} characters in each "
            "line"
        )
    return keys


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
