"""libp2p's connection table, host, upgrader and dialler, with their defects repaired (0.8.1)."""

import contextlib
import errno
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.host.ping import ID as PING_PROTOCOL
from libp2p.host.ping import handle_ping
from libp2p.identity.identify.identify import ID as IDENTIFY_PROTOCOL
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.identify_push.identify_push import ID_PUSH as IDENTIFY_PUSH_PROTOCOL
from libp2p.identity.update import update_peerstore_from_identify
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.connection.raw_connection import ConnectionType, RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.relay.circuit_v2.dcutr import MAX_OBSERVED_ADDRS, DCUtRProtocol
from libp2p.relay.circuit_v2.protocol import STOP_PROTOCOL_ID as STOP_PROTOCOL
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from libp2p.transport.exceptions import MuxerUpgradeFailure, OpenConnectionError
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from libp2p.utils import read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr

from swarm.transport import limits, room
from swarm.transport.libp2p import yamux
from swarm.transport.libp2p.addresses import LOOPBACK, host_and_port, multiaddr
from swarm.transport.libp2p.guard import (
    BoundedMultiselect,
    BoundedMultiselectClient,
    Guard,
    innermost,
)
from swarm.transport.libp2p.sealed import SealedMessages
from swarm.transport.libp2p.yamux import Shared, Yamux
from swarm.wire.identity import InvalidPeerId, PeerId, public_key_of

log = logging.getLogger(__name__)

CONNECTIONS_PER_PEER_MAX = 3
"""Connections to one peer: both sides may dial at once, and a relayed one may become direct."""

NEGOTIATIONS_PER_CONNECTION_MAX = 16
"""Streams of one connection that negotiate their protocol at once; more must wait."""

LIBP2P_STREAMS_PER_CONNECTION_MAX = 32
"""Streams of libp2p's own protocols (ping, identify, circuits) served on one connection: each may
hold a message of 64 KiB, and a peer reaches about ten others through one relay."""

IDENTIFY_BYTES_MAX = 16 * 1024
"""A peer's identify message: key, protocols, addresses. go-libp2p sends at most 8 KiB."""


class _Buffered(RawConnection):  # type: ignore[misc]
    """A TCP connection read in large parts. One task at a time reads, and one writes, so that
    libp2p's locks, each of which costs a turn of the event loop, are passed by."""

    _buffer = b""
    _at = 0

    def __init__(self, stream: Any, initiator: bool) -> None:
        super().__init__(stream, initiator)
        self._remote: tuple[str, int] | None = None
        with contextlib.suppress(OSError):  # the connection is closed already
            host, port = stream.stream.socket.getpeername()[:2]
            # A listener at :: may accept IPv4, and shows it as ::ffff:192.0.2.7.
            self._remote = (host.removeprefix("::ffff:") if "." in host else host), port

    def get_remote_address(self) -> tuple[str, int] | None:
        """The remote host and port; libp2p's own method does not support IPv6."""
        return self._remote

    async def read(self, n: int | None = None) -> bytes:
        if self._at == len(self._buffer):
            self._buffer, self._at = bytes(await self.stream.stream.receive_some(65536)), 0
        start = self._at
        self._at = len(self._buffer) if n is None else min(start + n, len(self._buffer))
        return self._buffer[start : self._at]

    async def write(self, data: bytes) -> None:
        await self.stream.stream.send_all(data)


class _NoAutoConnector(AutoConnector):  # type: ignore[misc]
    """Dials nothing: libp2p's own dials every address it knows, whatever its watermarks say."""

    async def maybe_connect(self) -> None:
        return


class TamedSwarm(Swarm):  # type: ignore[misc]
    """libp2p's connection table with its defects repaired. In libp2p 0.8.1:

    - The table dials strangers by itself.
    - An accepted connection keeps its inbound slot, a task and its socket object until the host
      ends, so a host stops accepting after `max_connections` connections in its whole life.
    - There is no limit per remote address, and a full table refuses newcomers.
    - A peer cannot be refused by its id."""

    def __init__(self, guard: Guard, tcp: "TamedTCP", *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, transports=[tcp], **kwargs)
        self.guard = guard
        self.tcp = tcp
        self.refuses: Callable[[PeerId], bool] = lambda peer: False
        self.vouches: Callable[[PeerId], bool] = lambda peer: False
        self.trusts: Callable[[PeerId], bool] = lambda peer: False
        self.opened: Callable[[Connection], None] = lambda connection: None
        self.closed: Callable[[Connection], None] = lambda connection: None
        """Called with each connection that enters and leaves the table."""
        self.needs: Callable[[ID], bool] = lambda peer: False
        """Whether a relay and its client need their connection although it carries no stream."""
        self._door = room.Door()
        self.connections_max = room.connections_max()

    def _init_connection_management(self) -> None:
        super()._init_connection_management()
        self.auto_connector = _NoAutoConnector(swarm=self, auto_connect_interval=1e9)

    async def _handle_inbound_connection(self, read_write_closer: Any, maddr: Any) -> None:
        raw = _Buffered(read_write_closer, False)
        host = (raw.get_remote_address() or ("an address already gone",))[0]
        try:
            with self._door.entered(host) as (caller, displaced):
                if displaced is not None:
                    self._let_go(displaced)
                with caller.handshake:
                    muxed = await self.upgrade_inbound_raw_conn(raw, maddr)
                    caller.shaking = False
                    caller.connection = muxed.connection
                if caller.connection is not None:
                    await muxed.event_closed.wait()
                    if muxed.expelled and not caller.connection.vouched:
                        self._door.shut(caller)
        except room.NoRoom as error:
            self.guard.tell("connection", host, str(error))
        except Exception as error:  # a stranger's handshake can make libp2p raise anything
            log.debug("connection from %s refused: %r", host, error)
        finally:
            read_write_closer.stream.socket.close()

    async def handshake(self, address: Multiaddr, peer: ID) -> None:
        """Connect, let the other side prove that it is `peer`, and hang up. Raises `BROKEN`."""
        raw = await self.tcp.dial(address)
        try:
            await self.upgrader.upgrade_security(raw, True, peer)
        finally:
            with trio.move_on_after(limits.STREAM_WRITE_SECONDS, shield=True):
                await raw.close()

    def _let_go(self, connection: Any) -> None:
        log.debug("closing %s to make room for another connection", connection.muxed_conn.peer_id)
        connection.leaving = True
        self._start(connection, connection.close)

    def _make_room(self, connection: "Connection") -> None:
        """Make room for a connection; raises `SwarmException` if none can be made."""
        held = [c for c in self.get_connections() if not c.leaving]
        own = self.connections.get(connection.muxed_conn.peer_id, [])
        own = [c for c in own if not c.leaving]
        if len(own) >= CONNECTIONS_PER_PEER_MAX:
            self._let_go(min(own, key=lambda c: (len(c.streams), c.opened_at)))
        elif room.is_full(held, self.connections_max):
            useless = room.least_useful(held, connection.origin)
            if useless is None and connection.vouched:  # all are admitted peers', and in use
                useless = room.most_crowding(held, connection)
            if useless is None:
                raise SwarmException("there are too many connections")
            self._let_go(useless)

    def trim(self, kept: int) -> None:
        """Close idle connections beyond `kept`."""
        for each in room.surplus([c for c in self.get_connections() if not c.leaving], kept):
            self._let_go(each)

    async def notify_opened_stream(self, stream: Any) -> None:
        """Do nothing: nothing here needs the notice, and libp2p's own starts a nursery for it."""

    async def notify_closed_stream(self, stream: Any) -> None:
        """Do nothing, for the same reason."""

    async def add_conn(self, muxed_conn: Any, direction: str = "unknown") -> "Connection":
        """Add a connection to the table; the guard runs its tasks and those of its streams."""
        peer = PeerId(str(muxed_conn.peer_id))
        try:
            public_key_of(peer)
            reason = "the peer is banned here" if self.refuses(peer) else None
            if muxed_conn.peer_id == self.get_peer_id():
                reason = "it has this peer's own key"
        except InvalidPeerId as error:  # RSA or secp256k1: its signatures cannot be checked here
            reason = str(error)
        if reason is not None:
            await muxed_conn.secured_conn.close()
            raise SwarmException(reason)
        connection = Connection(muxed_conn, self, direction)
        try:
            self._make_room(connection)
            self._start(connection, muxed_conn.start)
            await muxed_conn.event_started.wait()
            self._start(connection, connection.start)
            await connection.event_started.wait()
            self.connections.setdefault(muxed_conn.peer_id, []).append(connection)
            self._tell(self.opened, connection)
            await self.notify_connected(connection)
        except BaseException:
            with trio.move_on_after(limits.STREAM_WRITE_SECONDS, shield=True):
                await connection.close()
            raise
        return connection

    def _start(self, connection: "Connection", task: Callable[[], Any]) -> None:
        peer = str(connection.muxed_conn.peer_id)
        self.background_nursery.start_soon(
            self.guard.run, "connection", peer, task, connection.close, name=f"connection {peer}"
        )

    async def notify_disconnected(self, conn: Any) -> None:
        """Notify, and forget the peer: libp2p's own remembers every peer that ever left."""
        self._tell(self.closed, conn)
        await self._notify("disconnected", conn)
        self.forget(conn.muxed_conn.peer_id)

    def _tell(self, notice: "Callable[[Connection], None]", connection: "Connection") -> None:
        """Call a notice. What it raises is our own defect, which libp2p would only log."""
        try:
            notice(connection)
        except Exception as error:
            self.background_nursery.start_soon(_raise, error)

    def forget(self, peer_id: ID) -> None:
        """Delete what the peer store holds of a peer that is not connected."""
        if not self.connections.get(peer_id):
            self.peerstore.peer_data_map.pop(peer_id, None)
            self.peerstore.peer_record_map.pop(peer_id, None)


class Connection(SwarmConn):  # type: ignore[misc]
    """A connection in the table. The guard runs each of its streams: in libp2p's own class an
    exception in one stream ends the whole host."""

    def __init__(self, muxed_conn: Any, swarm: TamedSwarm, direction: str) -> None:
        super().__init__(muxed_conn, swarm, direction=direction)
        self.negotiating = trio.Semaphore(NEGOTIATIONS_PER_CONNECTION_MAX)
        muxed_conn.connection = self
        self.peer = PeerId(str(muxed_conn.peer_id))
        host = (muxed_conn.get_remote_address() or ("an address already gone",))[0]
        self.origin = room.origin_of(host)
        self.opened_at = self.used_at = trio.current_time()
        self.leaving = False
        self.served = 0
        kind = muxed_conn.get_connection_type()
        addresses = muxed_conn.get_transport_addresses()
        self.set_transport_info(addresses, kind)
        self.relayed = kind is ConnectionType.RELAYED or any(
            "/p2p-circuit" in str(address) for address in addresses
        )

    @property
    def vouched(self) -> bool:
        """Whether its peer is trusted, admitted or otherwise known."""
        return bool(self.swarm.vouches(self.peer))

    @property
    def trusted(self) -> bool:
        return bool(self.swarm.trusts(self.peer))

    @property
    def idle(self) -> bool:
        """See `swarm.transport.room.Held`."""
        old = trio.current_time() - self.opened_at >= limits.CONNECTION_GRACE_SECONDS
        return old and not self.muxed_conn.streams and not self.needed

    @property
    def needed(self) -> bool:
        """Whether it is between a relay and a peer that it serves."""
        return bool(self.swarm.needs(self.muxed_conn.peer_id))

    async def _add_stream(self, muxed_stream: Any) -> Any:
        self.used_at = trio.current_time()
        return await super()._add_stream(muxed_stream)

    def remove_stream(self, stream: Any) -> None:
        self.used_at = trio.current_time()
        super().remove_stream(stream)

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
        """Close the connection. Only the first call does anything."""
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
            if stream.get_protocol() != STOP_PROTOCOL:  # a STOP stream now carries a connection
                with trio.move_on_after(limits.STREAM_WRITE_SECONDS, shield=True):
                    await muxed_stream.retire()


class Host(BasicHost):  # type: ignore[misc]
    """libp2p's host, with bounded negotiation and the transport's addresses; its own announces
    0.0.0.0 if it listens there. Identify runs in the guard: in libp2p's system task an exception
    ends the process."""

    def __init__(self, swarm: TamedSwarm) -> None:
        super().__init__(swarm, negotiate_timeout=int(limits.STREAM_OPEN_DEADLINE_SECONDS))
        mux: Any = self.get_mux()
        self.multiselect = BoundedMultiselect(mux.handlers)
        self.multiselect_client = BoundedMultiselectClient()
        self.punching = HolePunching(self)
        self.set_stream_handler(PING_PROTOCOL, handle_ping)  # the default remembers every peer
        self.remove_stream_handler(IDENTIFY_PUSH_PROTOCOL)  # up to 1 MiB at once on every stream

    addresses: Callable[[], Sequence[str]] = staticmethod(lambda: ())
    """The addresses that the transport announces, relayed ones included."""

    def get_addrs(self) -> list[Multiaddr]:
        direct = [each for each in self.addresses() if "/p2p-circuit" not in each]
        remote = [each for each in direct if not each.startswith(LOOPBACK)]
        return [Multiaddr(each) for each in remote or direct]

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
        connection = net_stream.swarm_conn
        if not protocol.startswith(("/ipfs/", "/libp2p/")):  # our protocols have their own limit
            await handler(net_stream)
        elif connection.served < LIBP2P_STREAMS_PER_CONNECTION_MAX:
            connection.served += 1
            try:
                await handler(net_stream)
            finally:
                connection.served -= 1

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

    async def _identify_peer(self, peer_id: ID, *, reason: str) -> None:
        """Ask a peer to identify itself; libp2p's own method accepts an answer of 1 MiB."""
        message = Identify()
        with trio.fail_after(limits.STREAM_OPEN_DEADLINE_SECONDS):
            stream = await self.new_stream(peer_id, [IDENTIFY_PROTOCOL])
            try:
                message.ParseFromString(
                    await read_varint_prefixed_bytes_limited(stream, IDENTIFY_BYTES_MAX)
                )
                await stream.close()
            finally:
                await stream.muxed_stream.retire()
        await update_peerstore_from_identify(self.peerstore, peer_id, message)
        connection = stream.swarm_conn
        if connection.is_closed:
            self._network.forget(peer_id)
        elif message.observed_addr and not connection.relayed:
            seen_at = Multiaddr(message.observed_addr)
            self._observed_addr_manager.record_observation(
                connection, seen_at, self.get_transport_addrs()
            )


class Upgrader(TransportUpgrader):  # type: ignore[misc]
    """Negotiates noise and yamux with bounded messages."""

    def __init__(self, noise: Any, guard: Guard) -> None:
        super().__init__(noise, {TProtocol(yamux.PROTOCOL): Yamux})
        self._guard = guard
        self._shared = Shared()
        self.proved: Callable[[PeerId], None] = lambda peer: None
        for layer in (self.security_multistream, self.muxer_multistream):
            selector = layer._selector
            selector.multiselect = BoundedMultiselect(selector.multiselect.handlers)
            selector.multiselect_client = BoundedMultiselectClient()

    async def upgrade_security(
        self, raw_conn: Any, is_initiator: bool, peer_id: ID | None = None
    ) -> Any:
        secured = await super().upgrade_security(raw_conn, is_initiator, peer_id)
        secured.conn = SealedMessages(raw_conn, secured.conn.noise_state)
        if not is_initiator:
            self.proved(PeerId(str(secured.get_remote_peer())))
        return secured

    async def upgrade_connection(self, conn: Any, peer_id: ID) -> Yamux:
        """Negotiate yamux; libp2p's own method ignores the muxer class it was given."""
        try:
            await self.muxer_multistream.select_transport(conn)
        except MultiselectError as error:
            raise MuxerUpgradeFailure("no muxer was agreed on") from error
        tell = functools.partial(self._guard.tell, "stream", str(peer_id))
        return Yamux(conn, peer_id, self._shared, tell)


class TamedTCP(TCP):  # type: ignore[misc]
    """Remembers the sockets it dialled: a cancelled libp2p does not close them. Dials from the
    listening port where a NAT may be in between, so that it maps this port."""

    def __init__(self) -> None:
        super().__init__()
        self._dialled: weakref.WeakSet[Any] = weakref.WeakSet()
        self.source_for: Callable[[str], tuple[str, int] | None] = lambda host: None

    async def _dial_resolved(self, maddr: Any, source: Any = None) -> Any:
        # libp2p punches from its first listener, whatever the address family.
        source = self.source_for(host_and_port(maddr)[0])
        try:
            connection = await super()._dial_resolved(maddr, source)
        except OpenConnectionError as error:
            if source is None or getattr(innermost(error), "errno", None) != errno.EADDRNOTAVAIL:
                raise
            # The port has, or had a minute ago, another connection to the same place.
            connection = await super()._dial_resolved(maddr)
        self._dialled.add(connection.stream.stream)
        return _Buffered(connection.stream, True)

    def close_sockets(self) -> None:
        for stream in list(self._dialled):
            stream.socket.close()


class HolePunching(DCUtRProtocol):  # type: ignore[misc]
    """DCUtR without its two-second poll over all connections: `Libp2pTransport` starts it when a
    relayed connection is accepted, as the specification requires. It tells the other side where
    others see this peer; libp2p's own expects every NAT to keep the port."""

    seen: Callable[[], list[tuple[str, int]]] = staticmethod(lambda: [])
    """Where others see connections from this peer's listening port."""

    def is_at_work(self, peer: PeerId) -> bool:
        """Whether a hole is being punched to a peer."""
        return ID.from_string(peer) in self._in_progress

    async def _get_observed_addrs(self) -> list[bytes]:
        seen = [multiaddr(*place).to_bytes() for place in self.seen()]
        expected: list[bytes] = await super()._get_observed_addrs()
        return list(dict.fromkeys(seen + expected))[:MAX_OBSERVED_ADDRS]

    async def _auto_drive_loop(self) -> None:
        return

    async def _close_relayed_conns_after_grace(self, peer_id: ID, *args: Any) -> None:
        close = functools.partial(super()._close_relayed_conns_after_grace, peer_id, *args)
        await self.host.get_network().guard.run("connection", str(peer_id), close, _nothing)


async def _nothing() -> None: ...


async def _raise(error: Exception) -> None:
    raise error
