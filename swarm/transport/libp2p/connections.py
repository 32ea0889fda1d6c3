"""libp2p's connection table and what it starts for a connection, put right (libp2p 0.8.1)."""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.connection.raw_connection import ConnectionType, RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.relay.circuit_v2.dcutr import DCUtRProtocol
from libp2p.relay.circuit_v2.protocol import STOP_PROTOCOL_ID as STOP_PROTOCOL
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from libp2p.transport.exceptions import MuxerUpgradeFailure
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader

from swarm import defaults
from swarm.identity import InvalidPeerId, PeerId, public_key_of
from swarm.transport.libp2p import yamux
from swarm.transport.libp2p.guard import Guard
from swarm.transport.libp2p.negotiation import BoundedMultiselect, BoundedMultiselectClient
from swarm.transport.libp2p.yamux import Unread, Yamux

log = logging.getLogger(__name__)


class _Buffered(RawConnection):  # type: ignore[misc]
    """A TCP connection read in large pieces: noise asks for two bytes, then for the rest."""

    _buffer = b""
    _at = 0

    async def read(self, n: int | None = None) -> bytes:
        if self._at == len(self._buffer):
            self._buffer, self._at = await super().read(65536), 0
        start = self._at
        self._at = len(self._buffer) if n is None else min(start + n, len(self._buffer))
        return self._buffer[start : self._at]


class _NoAutoConnector(AutoConnector):  # type: ignore[misc]
    """libp2p's dials every address it has ever heard of, whatever its watermarks say."""

    async def maybe_connect(self) -> None:
        return


class TamedSwarm(Swarm):  # type: ignore[misc]
    """libp2p's connection table with its defects repaired (libp2p 0.8.1).

    - It dials strangers by itself.
    - An accepted connection keeps its inbound slot, a task and its socket object until the host
      ends, so a host stops accepting after `max_connections` connections in its whole life.
    - There is no bound per remote address.
    - There is no way to refuse a peer by its id.
    """

    def __init__(self, guard: Guard, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.guard = guard
        self.refuses: Callable[[PeerId], bool] = lambda peer: False
        self._inbound_by_host: Counter[str] = Counter()

    def _init_connection_management(self) -> None:
        super()._init_connection_management()
        self.auto_connector = _NoAutoConnector(swarm=self, auto_connect_interval=1e9)

    async def _do_handle_inbound_connection(
        self, read_write_closer: Any, maddr: Any, failure_event: Any
    ) -> None:
        try:  # libp2p's own get_remote_address knows no IPv6
            host = str(read_write_closer.stream.socket.getpeername()[0])
        except OSError:
            host = "an address already gone"
        if self._inbound_by_host[host] >= defaults.CONNECTIONS_PER_ADDRESS_MAX:
            log.warning("%s has too many connections, one more is refused", host)
            await read_write_closer.close()
            return
        self._inbound_by_host[host] += 1
        try:
            connection = _Buffered(read_write_closer, False)
            try:
                muxed = await self.upgrade_inbound_raw_conn(connection, maddr)
            except Exception as error:  # whatever a stranger's handshake makes libp2p raise
                log.debug("connection from %s refused: %r", host, error)
                await connection.close()
                return
            await muxed.event_closed.wait()
        finally:
            read_write_closer.stream.socket.close()
            self._inbound_by_host[host] -= 1
            if not self._inbound_by_host[host]:
                del self._inbound_by_host[host]

    async def notify_opened_stream(self, stream: Any) -> None:
        """Nobody listens; libp2p would start a nursery with a task for each who does not."""

    async def notify_closed_stream(self, stream: Any) -> None:
        """Likewise."""

    async def add_conn(self, muxed_conn: Any, direction: str = "unknown") -> Connection:
        """Take a connection in; its tasks and those of its streams end in the guard."""
        peer = PeerId(str(muxed_conn.peer_id))
        try:
            public_key_of(peer)
            reason = "the peer is banned here" if self.refuses(peer) else None
        except InvalidPeerId as error:  # RSA or secp256k1: nothing here could check its signatures
            reason = str(error)
        if len(self.get_connections()) >= defaults.CONNECTIONS_MAX:
            reason = "there are too many connections"
        if reason is not None:
            await muxed_conn.secured_conn.close()
            raise SwarmException(reason)
        connection = Connection(muxed_conn, self, direction)
        try:
            self._start(connection, muxed_conn.start)
            await muxed_conn.event_started.wait()
            self._start(connection, connection.start)
            await connection.event_started.wait()
            self.connections.setdefault(muxed_conn.peer_id, []).append(connection)
            if len(self.connections[muxed_conn.peer_id]) > defaults.CONNECTIONS_PER_PEER_MAX:
                self._trim_connections(muxed_conn.peer_id)
            self._schedule_prune()
            await self.notify_connected(connection)
        except BaseException:
            with trio.move_on_after(defaults.STREAM_WRITE_SECONDS, shield=True):
                await connection.close()
            raise
        return connection

    def _start(self, connection: Connection, task: Callable[[], Any]) -> None:
        peer = str(connection.muxed_conn.peer_id)
        self.background_nursery.start_soon(
            self.guard.run, "connection", peer, task, connection.close, name=f"connection {peer}"
        )

    async def notify_disconnected(self, conn: Any) -> None:
        """Without libp2p's own memory of everybody who ever left."""
        await self._notify("disconnected", conn)
        if not self.connections.get(conn.muxed_conn.peer_id):
            self.peerstore.peer_data_map.pop(conn.muxed_conn.peer_id, None)
            self.peerstore.peer_record_map.pop(conn.muxed_conn.peer_id, None)


class Connection(SwarmConn):  # type: ignore[misc]
    """A connection in the table. Each of its streams runs in the guard: in libp2p's class an
    exception of one stream ends the whole host."""

    def __init__(self, muxed_conn: Any, swarm: TamedSwarm, direction: str) -> None:
        super().__init__(muxed_conn, swarm, direction=direction)
        self.negotiating = trio.Semaphore(defaults.NEGOTIATIONS_PER_CONNECTION_MAX)
        kind = muxed_conn.get_connection_type()
        addresses = muxed_conn.get_transport_addresses()
        self.set_transport_info(addresses, kind)
        self.relayed = kind is ConnectionType.RELAYED or any(
            "/p2p-circuit" in str(address) for address in addresses
        )

    async def start(self) -> None:
        self.event_started.set()
        async with trio.open_nursery() as nursery:
            while not self.event_closed.is_set():
                try:
                    stream = await self.muxed_conn.accept_stream()
                except MuxedConnUnavailable:
                    break
                nursery.start_soon(self._handle_muxed_stream, stream)
            await self.close()

    async def close(self) -> None:
        """Only the first call does anything."""
        if self.event_closed.is_set():
            return
        self.event_closed.set()
        self.swarm.remove_conn(self)
        await self.muxed_conn.close()
        self.streams.clear()
        await self.swarm.notify_disconnected(self)

    async def _handle_muxed_stream(self, muxed_stream: Any) -> None:
        stream = await self._add_stream(muxed_stream)
        try:
            await self.swarm.guard.run(
                "stream",
                str(self.muxed_conn.peer_id),
                functools.partial(self.swarm.common_stream_handler, stream),
                stream.reset,
            )
        finally:
            self.remove_stream(stream)
            if stream.get_protocol() != STOP_PROTOCOL:  # that stream now carries a connection
                with trio.move_on_after(defaults.STREAM_WRITE_SECONDS, shield=True):
                    await muxed_stream.retire()


class Host(BasicHost):  # type: ignore[misc]
    """libp2p's host, with bounded negotiation. It asks who somebody is in a task of trio itself, in
    which an exception would end the process; here that runs in the guard."""

    def __init__(self, swarm: TamedSwarm) -> None:
        super().__init__(swarm, negotiate_timeout=int(defaults.STREAM_OPEN_DEADLINE_SECONDS))
        mux: Any = self.get_mux()
        self.multiselect = BoundedMultiselect(mux.handlers)
        self.multiselect_client = BoundedMultiselectClient()

    async def _swarm_stream_handler(self, net_stream: Any) -> None:
        try:
            async with net_stream.swarm_conn.negotiating:
                protocol, handler = await self.multiselect.negotiate(
                    MultiselectCommunicator(net_stream), self.negotiate_timeout
                )
        except MultiselectError as error:
            log.debug("%s: %r", net_stream.muxed_conn.peer_id, error)
            return
        net_stream.set_protocol(protocol)
        await handler(net_stream)

    def _schedule_identify(self, peer_id: ID, *, reason: str) -> None:
        if peer_id in self._identify_inflight or not self._should_identify_peer(peer_id):
            return
        self._identify_inflight.add(peer_id)

        self._network.background_nursery.start_soon(
            self._network.guard.run,
            "stream",
            str(peer_id),
            functools.partial(self._identify_task_entry, peer_id, reason),
            _nothing,
        )


class Upgrader(TransportUpgrader):  # type: ignore[misc]
    """Agrees on noise and yamux with bounded messages."""

    def __init__(self, noise: Any, guard: Guard) -> None:
        super().__init__(noise, {TProtocol(yamux.PROTOCOL): Yamux})
        self._guard = guard
        self._unread = Unread()
        for layer in (self.security_multistream, self.muxer_multistream):
            selector = layer._selector
            selector.multiselect = BoundedMultiselect(selector.multiselect.handlers)
            selector.multiselect_client = BoundedMultiselectClient()

    async def upgrade_connection(self, conn: Any, peer_id: ID) -> Yamux:
        """libp2p's own makes a muxer of its own, whatever it was given."""
        try:
            await self.muxer_multistream.select_transport(conn)
        except MultiselectError as error:
            raise MuxerUpgradeFailure("no muxer was agreed on") from error
        tell = functools.partial(self._guard.tell, "stream", str(peer_id))
        return Yamux(conn, peer_id, self._unread, tell)


class TamedTCP(TCP):  # type: ignore[misc]
    """Remembers the sockets it dialled: libp2p closes them only if it is not cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self._dialled: weakref.WeakSet[Any] = weakref.WeakSet()

    async def _dial_resolved(self, maddr: Any, source: Any = None) -> Any:
        connection = await super()._dial_resolved(maddr, source)
        self._dialled.add(connection.stream.stream)
        return _Buffered(connection.stream, True)

    def close_sockets(self) -> None:
        for stream in list(self._dialled):
            stream.socket.close()


class HolePunching(DCUtRProtocol):  # type: ignore[misc]
    """DCUtR without its two-second poll over all connections: `Libp2pTransport` starts it when a
    relayed connection comes in, as the specification has it."""

    async def _auto_drive_loop(self) -> None:
        return

    async def _close_relayed_conns_after_grace(self, peer_id: ID, *args: Any) -> None:
        close = functools.partial(super()._close_relayed_conns_after_grace, peer_id, *args)
        await self.host.get_network().guard.run("connection", str(peer_id), close, _nothing)


async def _nothing() -> None: ...
