"""`Libp2pTransport`: the seam of `swarm.transport` on libp2p."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio
from libp2p.abc import INetStream, INotifee
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import StreamFailure
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import ConnectionType, RawConnection
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as CircuitPeerId
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP_PROTOCOL
from libp2p.relay.circuit_v2.protocol_buffer import StatusCode
from libp2p.relay.circuit_v2.resources import RelayLimits
from libp2p.relay.circuit_v2.utils import read_delimited_msg, write_delimited_msg
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from swarm import defaults
from swarm.errors import UserError
from swarm.events import Events
from swarm.identity import Identity, PeerId
from swarm.transport import (
    Arrived,
    BlobReference,
    ConnectError,
    ConnectionEvent,
    DialFailure,
    FetchError,
    Framing,
    Reachability,
    Source,
    Stream,
    StreamError,
)
from swarm.transport.base import BaseTransport
from swarm.transport.http import limits as http_limits
from swarm.transport.http.client import BulkClient
from swarm.transport.http.heads import Unreachable
from swarm.transport.http.messages import BLOB_PROTOCOL
from swarm.transport.http.over_stream import StreamServer, fetch_over_stream, push_over_stream
from swarm.transport.http.pace import Uplink
from swarm.transport.http.server import BulkServer
from swarm.transport.http.serving import Serving
from swarm.transport.libp2p.addresses import (
    check_port_free,
    dial_failure,
    expanded,
    host_and_port,
    is_global,
    parse_multiaddr,
    require_peer,
    resolved,
    without_peer,
)
from swarm.transport.libp2p.circuits import Circuits
from swarm.transport.libp2p.connections import (
    Connection,
    HolePunching,
    Host,
    TamedSwarm,
    TamedTCP,
    Upgrader,
)
from swarm.transport.libp2p.guard import BROKEN, Guard, reason_of
from swarm.world import Disk, Piece, Sink, World

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_BROKEN = (*BROKEN, ValueError)
"""A broken connection or stream, or nonsense on it; everything else is a defect, and loud."""


# --- streams ---------------------------------------------------------------------------------


class _Libp2pBytes:
    """A `ByteStream` over a libp2p stream."""

    def __init__(self, stream: INetStream) -> None:
        self._stream = stream
        self._read_closed = False
        self._write_closed = False

    async def read(self) -> bytes:
        try:
            return bytes(await self._stream.read(http_limits.READ_BYTES))
        except StreamEOF:
            self._read_closed = True
            if self._write_closed:
                await self._forget()
            return b""
        except _BROKEN as error:
            raise StreamError(f"the connection broke ({type(error).__name__})") from error

    async def write(self, data: bytes) -> None:
        # Shielded: half a message would garble the rest of the stream.
        with trio.move_on_after(defaults.STREAM_WRITE_SECONDS, shield=True):
            try:
                await self._stream.write(data)
            except _BROKEN as error:
                raise StreamError(f"the connection broke ({type(error).__name__})") from error
            return
        await self.reset()
        raise StreamError(f"nothing could be sent for {defaults.STREAM_WRITE_SECONDS:g} s")

    async def close_write(self) -> None:
        self._write_closed = True
        try:
            await self._stream.close_write()
        except _BROKEN as error:
            raise StreamError(f"the connection broke ({type(error).__name__})") from error
        if self._read_closed:
            await self._forget()

    async def reset(self) -> None:
        with trio.move_on_after(defaults.STREAM_WRITE_SECONDS, shield=True):
            try:
                await self._stream.reset()
            except _BROKEN as error:
                log.debug("resetting a stream: %r", error)

    async def _forget(self) -> None:
        """libp2p keeps an entry for every stream that ends by itself; this drops it."""
        with trio.move_on_after(defaults.STREAM_WRITE_SECONDS, shield=True):
            await self._stream.remove()


class _Notifee(INotifee):  # type: ignore[misc]
    """Hands libp2p's connection notices to the transport, in whose nursery a defect is loud:
    libp2p would only log it."""

    def __init__(self, transport: Libp2pTransport) -> None:
        self._transport = transport

    def _tell(self, notice: Callable[[Any], None], conn: Any) -> None:
        try:
            notice(conn)
        except Exception as error:
            self._transport._nursery.start_soon(_raise, error)

    async def connected(self, network: Any, conn: Any) -> None:
        self._tell(self._transport._on_connected, conn)

    async def disconnected(self, network: Any, conn: Any) -> None:
        self._tell(self._transport._on_disconnected, conn)

    async def opened_stream(self, network: Any, stream: Any) -> None: ...

    async def closed_stream(self, network: Any, stream: Any) -> None: ...

    async def listen(self, network: Any, multiaddr: Any) -> None: ...

    async def listen_close(self, network: Any, multiaddr: Any) -> None: ...


async def _raise(error: Exception) -> None:
    raise error


# --- the transport ---------------------------------------------------------------------------


NO_LIMIT = 1 << 30

CONNECT_SECONDS_MIN = 1.0
"""One of several HTTP addresses has at least this long: a few round trips."""


@asynccontextmanager
async def open_libp2p(
    identity: Identity,
    listen: Sequence[str] = (),
    *,
    world: World,
    disk: Disk,
    events: Events | None = None,
    relay: bool = False,
    relays: Sequence[str] = (),
    announce: Sequence[str] = (),
    bulk_port: int = 0,
    uplink_bytes_per_second: float | None = None,
) -> AsyncIterator[Libp2pTransport]:
    """A peer on the real network, until the block ends.

    `listen`: TCP multiaddrs; none for a peer that only dials. `events`: told what strangers did
    that was contained. `relay`: carry connections for
    peers behind NAT. `relays`: multiaddrs of relays that shall carry connections for this peer.
    `announce`: addresses to give out instead of those listened on (a forwarded port).
    `bulk_port`: where HTTP is served, on the same interfaces (0: any).
    `uplink_bytes_per_second`: most that blobs are sent at, all together.
    Raises `UserError` for a malformed address or a port that is taken.
    """
    addresses = []
    for text in listen:
        address, _ = parse_multiaddr(text)
        host, port = host_and_port(address)
        check_port_free(host, port)
        if bulk_port:
            check_port_free(host, bulk_port)
        addresses.append(address)
    announced = [parse_multiaddr(text)[0] for text in announce]
    for text in relays:
        require_peer(text)
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)

    key_pair = create_new_key_pair(identity.seed)
    peer_id = ID.from_pubkey(key_pair.public_key)
    peerstore = PeerStore()
    peerstore.add_key_pair(peer_id, key_pair)
    noise_key = create_new_x25519_key_pair().private_key
    guard = Guard(events)
    tcp = TamedTCP()
    swarm = TamedSwarm(
        guard,
        peer_id,
        peerstore,
        Upgrader({NOISE_PROTOCOL: NoiseTransport(key_pair, noise_key)}, guard),
        transports=[tcp],
        retry_config=RetryConfig(max_retries=0),
        connection_config=ConnectionConfig(
            max_connections=NO_LIMIT,  # `TamedSwarm` makes room itself
            high_watermark=NO_LIMIT,
            max_connections_per_peer=NO_LIMIT,
            inbound_upgrade_timeout=defaults.HANDSHAKE_SECONDS,
            low_watermark=0,
            min_connections=0,
            auto_connect_interval=1e9,
        ),
    )
    network = Host(swarm)
    circuits = Circuits(
        network,
        RelayLimits(
            duration=defaults.RELAY_CIRCUIT_SECONDS,
            data=defaults.RELAY_CIRCUIT_BYTES,
            max_circuit_conns=defaults.RELAY_CIRCUITS_PER_PEER_MAX,
            max_reservations=defaults.RELAY_RESERVATIONS_MAX,
            reservation_ttl=defaults.RELAY_RESERVATION_SECONDS,
        ),
        allow_hop=relay,
    )
    punching = HolePunching(network)
    async with network.run(addresses):
        if len(swarm.listeners) < len(addresses):
            raise UserError(f"cannot listen on {', '.join(listen)}; choose another with --listen")
        async with (
            background_trio_service(circuits),
            background_trio_service(punching),
            trio.open_nursery() as nursery,
        ):
            transport = Libp2pTransport(
                identity,
                network,
                swarm,
                punching,
                announced=announced,
                world=world,
                disk=disk,
                nursery=nursery,
                uplink=Uplink(uplink_bytes_per_second),
            )
            try:
                await transport._listen_bulk(addresses, bulk_port)
                for text in relays:
                    nursery.start_soon(transport._keep_reservation, text)
                yield transport
            finally:
                with trio.move_on_after(defaults.CLOSE_SECONDS, shield=True):
                    await transport._close()
                tcp.close_sockets()
                nursery.cancel_scope.cancel()


class Libp2pTransport(BaseTransport):
    """`swarm.transport.Transport` on libp2p. Made by `open_libp2p`."""

    def __init__(
        self,
        identity: Identity,
        host: Host,
        swarm: TamedSwarm,
        punching: HolePunching,
        *,
        announced: Sequence[Multiaddr],
        world: World,
        disk: Disk,
        nursery: trio.Nursery,
        uplink: Uplink,
    ) -> None:
        super().__init__(identity, world=world, disk=disk, nursery=nursery)
        self._host = host
        self._swarm = swarm
        self._punching = punching
        self._announced = announced
        self._connections: dict[PeerId, list[Connection]] = {}
        self._reservations: dict[str, Multiaddr] = {}
        self._dialling: dict[PeerId, trio.Lock] = {}
        self._seen_direct_inbound = False
        self._bulk = BulkClient(
            identity, disk, lambda: self._credential, self._traffic, uplink=uplink
        )
        serving = Serving(identity.peer_id, disk, lambda: self._service, self._traffic, uplink)
        self._bulk_server = BulkServer(serving)
        self._stream_server = StreamServer(serving)
        self._bulk_roots: list[str] = []
        self.serve(BLOB_PROTOCOL, self._stream_server.serve)
        swarm.refuses = self._is_banned
        swarm.vouches = self._is_vouched
        swarm.register_notifee(_Notifee(self))

    async def _close(self) -> None:
        """Take leave of everybody at once."""
        self._close_subscriptions()
        self._bulk.pool.close()
        async with trio.open_nursery() as nursery:
            for peer in list(self._connections):
                nursery.start_soon(self.disconnect, peer)

    # --- addresses ---

    def addresses(self) -> Sequence[str]:
        own = list(self._announced) or expanded(self._host.get_transport_addrs())
        result = [f"{without_peer(address)}/p2p/{self.peer_id}" for address in own]
        for relay in self._reservations.values():
            result.append(f"{relay}/p2p-circuit/p2p/{self.peer_id}")
        return tuple(result)

    def bulk_addresses(self) -> Sequence[str]:
        return tuple(self._bulk_roots)

    def reachability(self) -> Reachability:
        """PUBLIC once a stranger has connected directly or an address is announced or global;
        PRIVATE when not listening, or when only relays lead here."""
        if self._announced or self._seen_direct_inbound:
            return Reachability.PUBLIC
        own = self._host.get_transport_addrs()
        if not own:
            return Reachability.PRIVATE
        if any(is_global(address) for address in expanded(own)):
            return Reachability.PUBLIC
        return Reachability.PRIVATE if self._reservations else Reachability.UNKNOWN

    # --- connections ---

    def connected(self) -> Sequence[PeerId]:
        return sorted(self._connections)

    def network_of(self, peer: PeerId) -> str:
        direct = [c for c in self._connections.get(peer, ()) if not c.relayed]
        return direct[0].origin.public_range if direct else ""

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        await trio.lowlevel.checkpoint()
        if peer in self._connections:
            return
        if self._is_banned(peer):
            raise ConnectError(f"{peer} is banned here")
        if peer == self.peer_id:
            raise ConnectError("a peer does not connect to itself")
        failures: list[DialFailure] = []
        seconds = defaults.CONNECT_DEADLINE_SECONDS
        lock = self._dialling.setdefault(peer, trio.Lock())
        try:
            with trio.move_on_after(seconds) as scope:
                async with lock:
                    for address in addresses[: defaults.DIAL_ADDRESSES_MAX]:
                        if peer in self._connections:
                            return
                        failure = await self._try_address(peer, address)
                        if failure is None:
                            return
                        failures.append(failure)
        finally:
            if not lock.locked():
                self._dialling.pop(peer, None)
        reasons = [str(failure) for failure in failures]
        if scope.cancelled_caught:
            reasons.append(f"no answer within {seconds:g} s")
        raise ConnectError(
            f"cannot connect to {peer}: {'; '.join(reasons) or 'no address known'}", failures
        )

    async def _try_address(self, peer: PeerId, text: str) -> DialFailure | None:
        """None when connected, else why not."""
        try:
            address, named = parse_multiaddr(text)
        except UserError:
            return DialFailure(text, "not a TCP multiaddr")
        if named is not None and named != peer:
            return DialFailure(text, "the address names another peer")
        with trio.move_on_after(defaults.DIAL_DEADLINE_SECONDS) as scope:
            try:
                if "/p2p-circuit" in text:
                    await self._dial_relayed(peer, text)
                else:
                    # Not host.connect: that waits 250 ms after every dial that succeeded
                    # ("happy eyeballs"), and blocks a peer for 60 s after one that failed.
                    await self._dial_any(await resolved(address), ID.from_string(peer))
            except (ConnectError, StreamError) as error:
                return DialFailure(text, str(error))
            except _BROKEN as error:
                return dial_failure(text, error)
        if scope.cancelled_caught:
            return DialFailure(text, f"no answer within {defaults.DIAL_DEADLINE_SECONDS:g} s")
        return None

    async def _dial_any(self, addresses: Sequence[Multiaddr], peer: ID) -> None:
        """Dial addresses of one name in turn; raises what the last one did."""
        for address in addresses[:-1]:
            with contextlib.suppress(*_BROKEN):
                await self._swarm.dial_addr(address, peer)
                return
        await self._swarm.dial_addr(addresses[-1], peer)

    async def disconnect(self, peer: PeerId) -> None:
        for connection in list(self._connections.get(peer, ())):
            with trio.move_on_after(defaults.STREAM_WRITE_SECONDS):
                await connection.close()
        await trio.lowlevel.checkpoint()

    def ban(self, peer: PeerId, seconds: float) -> None:
        self._ban(peer, seconds)
        self._nursery.start_soon(self.disconnect, peer)

    def _on_connected(self, connection: Connection) -> None:
        peer = PeerId(str(connection.muxed_conn.peer_id))
        held = self._connections.setdefault(peer, [])
        was_direct = any(not other.relayed for other in held)
        first = not held
        held.append(connection)
        if first:
            self._bulk.pool.forget(peer)
        relayed = connection.relayed
        inbound = not connection.muxed_conn.is_initiator
        if inbound and not relayed:
            self._seen_direct_inbound = True
        if first or (not relayed and not was_direct):
            self._emit(ConnectionEvent(peer, connected=True, relayed=relayed))
        if not relayed:
            self._nursery.start_soon(self._watch, connection, name=f"watch {peer}")
        elif inbound:
            punch = functools.partial(self._punch, peer)
            self._nursery.start_soon(
                self._swarm.guard.run, "connection", peer, punch, connection.close
            )

    def _on_disconnected(self, connection: Connection) -> None:
        peer = PeerId(str(connection.muxed_conn.peer_id))
        held = self._connections.get(peer, [])
        if connection in held:
            held.remove(connection)
            if not held:
                del self._connections[peer]
                self._stream_server.forget(peer)
                self._emit(ConnectionEvent(peer, connected=False))

    async def _watch(self, connection: Connection) -> None:
        """Close a connection whose other end has gone silent."""
        muxed = connection.muxed_conn
        while not muxed.event_closed.is_set():
            with trio.move_on_after(defaults.CONNECTION_PING_SECONDS):
                await muxed.event_closed.wait()
                return
            with trio.move_on_after(defaults.CONNECTION_PONG_SECONDS) as scope:
                try:
                    await muxed.ping()
                except _BROKEN as error:
                    log.debug("pinging %s: %r", muxed.peer_id, error)
                else:
                    continue
            log.debug("%s is silent: %s", muxed.peer_id, scope.cancelled_caught)
            await connection.close()

    async def _punch(self, peer: PeerId) -> None:
        """Try to replace a relayed connection by a direct one."""
        with trio.move_on_after(defaults.CONNECT_DEADLINE_SECONDS * 3):
            direct = await self._punching.initiate_hole_punch(ID.from_string(peer))
            log.debug("hole punching to %s: %s", peer, direct)

    # --- relays ---

    async def use_relay(self, address: str) -> None:
        """Let a relay carry connections to this peer, from now on until it ends.

        Raises `ConnectError` when the relay cannot be reached or declines now.
        """
        await self._reserve(address)
        self._nursery.start_soon(self._keep_reservation, address)

    async def _keep_reservation(self, text: str) -> None:
        """Renew a reservation at half its life; get it back when the relay was lost."""
        _, relay = require_peer(text)
        while True:
            try:
                expires = await self._reserve(text)
            except (ConnectError, StreamError) as error:
                log.info("relay %s: %s", relay, error)
                self._reservations.pop(text, None)
                await trio.sleep(defaults.RELAY_RETRY_SECONDS)
                continue
            renew_at = trio.current_time() + max(expires - time.time(), 0.0) / 2
            with self.connection_events() as events, trio.move_on_at(renew_at):
                if relay in self._connections:
                    async for _ in events:
                        if relay not in self._connections:
                            break
                    else:
                        return  # this peer is closing
                self._reservations.pop(text, None)

    async def _reserve(self, text: str) -> float:
        """Ask for a reservation; returns when it expires (seconds since the epoch)."""
        address, relay = require_peer(text)
        await self.connect(relay, [text])
        stream, reply = await self._ask_relay(relay, HopMessage(type=HopMessage.RESERVE))
        await stream.reset()
        if reply.status != StatusCode.OK:
            raise ConnectError(f"relay {relay} declines: {_status_name(reply.status)}")
        self._reservations[text] = address
        return float(reply.reservation.expire)

    async def _dial_relayed(self, peer: PeerId, text: str) -> None:
        relay_text = text.partition("/p2p-circuit")[0]
        _, relay = require_peer(relay_text)
        await self.connect(relay, [relay_text])
        request = HopMessage(
            type=HopMessage.CONNECT, peer=CircuitPeerId(id=ID.from_string(peer).to_bytes())
        )
        stream, reply = await self._ask_relay(relay, request)
        if reply.status != StatusCode.OK:
            await stream.reset()
            raise ConnectError(f"relay {relay} declines: {_status_name(reply.status)}")
        connection = RawConnection(
            stream,
            initiator=True,
            connection_type=ConnectionType.RELAYED,
            addresses=[Multiaddr(text)],
        )
        await self._host.upgrade_outbound_connection(connection, ID.from_string(peer))

    async def _ask_relay(self, relay: PeerId, request: HopMessage) -> tuple[INetStream, HopMessage]:
        with trio.move_on_after(defaults.DIAL_DEADLINE_SECONDS):
            try:
                stream = await self._host.new_stream(ID.from_string(relay), [HOP_PROTOCOL])
                await write_delimited_msg(stream, request)
                return stream, await read_delimited_msg(stream, HopMessage)
            except Exception as error:  # protobuf's, varint's and the stream's errors alike
                raise ConnectError(f"relay {relay} does not answer: {error}") from error
        raise ConnectError(
            f"relay {relay} has not answered within {defaults.DIAL_DEADLINE_SECONDS:g} s"
        )

    # --- streams ---

    async def open_stream(
        self, peer: PeerId, protocol: str, framing: Framing = Framing.SWARM
    ) -> Stream:
        await trio.lowlevel.checkpoint()
        if peer not in self._connections:
            raise StreamError(f"stream {protocol} with {peer}: not connected")
        seconds = defaults.STREAM_OPEN_DEADLINE_SECONDS
        with trio.move_on_after(seconds):
            try:
                stream = await self._host.new_stream(ID.from_string(peer), [TProtocol(protocol)])
            except StreamFailure as error:
                unknown = "not supported" in str(error.__cause__)
                why = self.version_mismatch(peer, protocol) if unknown else "the peer reset it"
                raise StreamError(f"stream {protocol} with {peer}: {why}") from error
            except _BROKEN as error:
                raise StreamError(
                    f"stream {protocol} with {peer}: the connection broke ({reason_of(error)})"
                ) from error
            return self._opened_stream(_Libp2pBytes(stream), peer, protocol, framing)
        raise StreamError(f"stream {protocol} with {peer}: no answer within {seconds:g} s")

    def version_mismatch(self, peer: PeerId, protocol: str) -> str:
        """Why a peer does not speak a protocol, in words: what it told us about itself."""
        stem, _, version = protocol.rpartition("/")
        try:
            spoken = self._swarm.peerstore.get_protocols(ID.from_string(peer))
        except Exception:  # nothing known about the peer yet
            spoken = []
        for other in sorted(spoken):
            other_stem, _, other_version = str(other).rpartition("/")
            if other_stem == stem and other_version != version:
                return (
                    f"the peer speaks version {other_version}, this one {version}; "
                    "the older of the two must be updated"
                )
        return "the peer does not speak it"

    def serve(
        self,
        protocol: str,
        handler: Any,
        framing: Framing = Framing.SWARM,
        *,
        frame_bytes_max: int = defaults.FRAME_BYTES_MAX,
    ) -> None:
        super().serve(protocol, handler, framing, frame_bytes_max=frame_bytes_max)
        self._host.set_stream_handler(TProtocol(protocol), self._on_stream)

    async def _on_stream(self, stream: INetStream) -> None:
        peer = PeerId(str(stream.muxed_conn.peer_id))
        protocol = str(stream.get_protocol())
        carrier = _Libp2pBytes(stream)
        handler = self._admit_stream(peer, protocol)
        if handler is None:
            await carrier.reset()
        else:
            await self._serve_stream(carrier, peer, protocol, handler)

    # --- the bulk plane ---

    async def _listen_bulk(self, addresses: Sequence[Multiaddr], port: int) -> None:
        """Serve HTTP on the interfaces that libp2p listens on."""
        for host in dict.fromkeys(host_and_port(address)[0] for address in addresses):
            listeners = await trio.open_tcp_listeners(port, host=host)
            bound = listeners[0].socket.getsockname()[1]
            self._nursery.start_soon(self._bulk_server.serve, listeners)
            name = "ip6" if ":" in host else "ip4"
            for address in expanded([Multiaddr(f"/{name}/{host}/tcp/{bound}")]):
                own = host_and_port(address)[0]
                own = f"[{own}]" if ":" in own else own
                self._bulk_roots.append(f"http://{own}:{bound}")

    async def fetch(self, source: Source, reference: BlobReference, sink: Sink) -> Piece:
        async def ask(root: str, seconds: float) -> Piece:
            return await self._bulk.fetch(
                root, source.peer, reference, sink, connect_seconds=seconds
            )

        try:
            return await self._by_http(source, ask)
        except Unreachable as unreachable:
            return await self._fetch_over_stream(source, reference, sink, unreachable)

    async def fetch_run(
        self, source: Source, wanted: Sequence[tuple[BlobReference, Sink]], arrived: Arrived
    ) -> None:
        async def ask(root: str, seconds: float) -> None:
            await self._bulk.fetch_run(root, source.peer, wanted, arrived, connect_seconds=seconds)

        try:
            await self._by_http(source, ask)
        except Unreachable as unreachable:
            for reference, sink in wanted:
                await arrived(await self._fetch_over_stream(source, reference, sink, unreachable))

    def round_trip_seconds(self, source: Source) -> float:
        return self._bulk.pool.round_trip_seconds(source.addresses)

    async def push(self, target: Source, reference: BlobReference, path: str) -> None:
        async def ask(root: str, seconds: float) -> None:
            await self._bulk.push(root, target.peer, reference, path, connect_seconds=seconds)

        try:
            await self._by_http(target, ask)
        except Unreachable as unreachable:
            stream = await self._blob_stream(target, unreachable)
            await push_over_stream(
                stream, reference, self._disk, path, self._credential, self._traffic
            )

    async def _by_http(
        self, source: Source, ask: Callable[[str, float], Awaitable[_Result]]
    ) -> _Result:
        """`ask(root, seconds to connect)` at the first root of a source that can be reached.

        Raises `Unreachable` when none can, soon enough for another way to be tried. A root where
        nobody answered lately is left out while there is another, or a connection to the peer.
        """
        roots = source.addresses[: defaults.DIAL_ADDRESSES_MAX]
        likely = [root for root in roots if self._bulk.pool.may_reach(root, source.peer)]
        if likely or source.peer in self._connections:
            roots = tuple(likely)
        name = source.peer or "a source"
        unreachable = Unreachable(f"{name} has no bulk address and is not connected")
        deadline = trio.current_time() + http_limits.CONNECT_SECONDS
        for index, root in enumerate(roots):
            left = deadline - trio.current_time()
            if left <= 0:
                break  # the others have their turn in the next request
            share = max(left / (len(roots) - index), CONNECT_SECONDS_MIN)
            try:
                return await ask(root, min(left, share))
            except Unreachable as error:
                unreachable = error
        raise unreachable

    async def _fetch_over_stream(
        self, source: Source, reference: BlobReference, sink: Sink, unreachable: Unreachable
    ) -> Piece:
        stream = await self._blob_stream(source, unreachable)
        return await fetch_over_stream(stream, reference, sink, self._credential, self._traffic)

    async def _blob_stream(self, source: Source, unreachable: Unreachable) -> Stream:
        """The way to a source that has no HTTP address, or none that works."""
        if source.peer is None or source.peer not in self._connections:
            raise unreachable
        try:
            return await self.open_stream(source.peer, BLOB_PROTOCOL)
        except StreamError as error:
            raise FetchError(str(error)) from error


def _status_name(status: int) -> str:
    try:
        name: str = StatusCode(status).name
        return name.lower().replace("_", " ")
    except ValueError:
        return f"status {status}"
