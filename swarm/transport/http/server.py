"""The piece server: accepts HTTP connections and limits their number."""

from __future__ import annotations

import logging
from collections import Counter

import trio

from swarm.transport.http.messages import last_head
from swarm.transport.http.pace import Broken
from swarm.transport.http.serving import Serving
from swarm.transport.http.session import Clients, Session
from swarm.transport.http.wire import Buffers, Wire

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 512
"""Connections one server holds: each costs a socket and a task."""

CONNECTIONS_PER_ADDRESS_MAX = 64
"""Connections from one IP address."""


class BulkServer:
    """Answers the HTTP plane for one peer."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._clients = Clients()
        self._buffers = Buffers()
        self._by_host: Counter[str] = Counter()
        self._connections = 0

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
        self._by_host[host] += 1
        self._connections += 1
        try:
            if (
                self._connections > CONNECTIONS_MAX
                or self._by_host[host] > CONNECTIONS_PER_ADDRESS_MAX
            ):
                await wire.send(last_head(503) + b"too many connections")
                return
            session = Session(self._serving, self._clients, wire, host)
            try:
                await session.run()
            finally:
                session.end()
        except Broken as broken:
            log.debug("bulk client %s %s", host, broken)
        except Exception:  # a defect here must not let a stranger stop this peer
            log.exception("serving the bulk plane to %s failed", host)
        finally:
            self._connections -= 1
            self._by_host[host] -= 1
            if not self._by_host[host]:
                del self._by_host[host]
            wire.close()
