"""`Libp2pTransport`: the seam of `swarm.transport` on libp2p."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import trio
from libp2p.abc import INetStream, INotifee
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import StreamFailure
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarm.errors import UserError
from swarm.identity import Identity, PeerId
from swarm.transport import (
    Arrived,
    BlobReference,
    ConnectError,
    ConnectionEvent,
    DialFailure,
    Framing,
    Reachability,
    Source,
    Stream,
    StreamError,
    fetch_one,
    limits,
)
from swarm.transport.base import BaseTransport
from swarm.transport.http.messages import BLOB_PROTOCOL
from swarm.transport.http.pace import Uplink
from swarm.transport.http.serving import Serving
from swarm.transport.libp2p.addresses import (
    dial_failure,
    expanded,
    is_global,
    parse_multiaddr,
    resolved,
    without_peer,
)
from swarm.transport.libp2p.connections import Connection, HolePunching, Host, TamedSwarm
from swarm.transport.libp2p.guard import BROKEN, reason_of
from swarm.transport.libp2p.pieces import PiecePlane
from swarm.transport.libp2p.relays import Relays
from swarm.world import Disk, Piece, Sink, World

log = logging.getLogger(__name__)

BROKEN_STREAM = (*BROKEN, ValueError)
"""A broken connection or stream, or nonsense on it. Any other exception is our defect: not
caught."""

READ_BYTES = 1 << 20
"""Bytes read from a stream at once."""


@contextlib.contextmanager
def _breaking() -> Iterator[None]:
    try:
        yield
    except BROKEN_STREAM as error:
        raise StreamError(f"the connection broke ({type(error).__name__})") from error


class Libp2pBytes:
    """A `ByteStream` over a libp2p stream."""

    def __init__(self, stream: INetStream) -> None:
        self._stream = stream
        self._read_closed = False
        self._write_closed = False

    async def read(self) -> bytes:
        with _breaking():
            try:
                return bytes(await self._stream.read(READ_BYTES))
            except StreamEOF:
                self._read_closed = True
        if self._write_closed:
            await self._forget()
        return b""

    async def write(self, data: bytes) -> None:
        # Shielded: half a message would garble the rest of the stream.
        with trio.move_on_after(limits.STREAM_WRITE_SECONDS, shield=True):
            with _breaking():
                await self._stream.write(data)
            return
        await self.reset()
        raise StreamError(f"nothing could be sent for {limits.STREAM_WRITE_SECONDS:g} s")

    async def close_write(self) -> None:
        self._write_closed = True
        with _breaking():
            await self._stream.close_write()
        if self._read_closed:
            await self._forget()

    async def reset(self) -> None:
        with trio.move_on_after(limits.STREAM_WRITE_SECONDS, shield=True):
            try:
                await self._stream.reset()
            except BROKEN_STREAM as error:
                log.debug("resetting a stream: %r", error)

    async def _forget(self) -> None:
        """Drop libp2p's entry of a stream that has ended; libp2p itself keeps it."""
        with trio.move_on_after(limits.STREAM_WRITE_SECONDS, shield=True):
            await self._stream.remove()


class _Notifee(INotifee):  # type: ignore[misc]
    """Passes libp2p's connection notices to the transport.

    An exception is raised in the transport's nursery: libp2p would only log it.
    """

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


class Libp2pTransport(BaseTransport):
    """`swarm.transport.Transport` on libp2p. Made by `open_libp2p`."""

    def __init__(
        self,
        identity: Identity,
        host: Host,
        punching: HolePunching,
        uplink: Uplink,
        *,
        world: World,
        disk: Disk,
        nursery: trio.Nursery,
    ) -> None:
        super().__init__(identity, world=world, disk=disk, nursery=nursery)
        self._host = host
        self._swarm: TamedSwarm = host.get_network()
        self._punching = punching
        self._connections: dict[PeerId, list[Connection]] = {}
        self._relays = Relays(host, self)
        self._dialling: dict[PeerId, trio.Lock] = {}
        self._seen_direct_inbound = False
        serving = Serving(identity.peer_id, disk, lambda: self._service, self.traffic, uplink)
        self._pieces = PiecePlane(identity, serving, lambda: self._credential, self)
        self.serve(BLOB_PROTOCOL, self._pieces.serve_stream)
        self._swarm.refuses = self._is_banned
        self._swarm.vouches = self._is_vouched
        self._swarm.register_notifee(_Notifee(self))

    async def listen_http(self, addresses: Sequence[Multiaddr], port: int) -> None:
        """Serve blobs on the interfaces of `addresses`; once, before anything else."""
        await self._pieces.listen(addresses, port, self._nursery)

    async def close(self) -> None:
        """Close all connections at once."""
        self._close_subscriptions()
        self._pieces.close()
        async with trio.open_nursery() as nursery:
            for peer in list(self._connections):
                nursery.start_soon(self.disconnect, peer)

    # --- addresses ---

    def addresses(self) -> Sequence[str]:
        own = expanded(self._host.get_transport_addrs())
        result = [f"{without_peer(address)}/p2p/{self.peer_id}" for address in own]
        for relay in self._relays.addresses():
            result.append(f"{relay}/p2p-circuit/p2p/{self.peer_id}")
        return tuple(result)

    def bulk_addresses(self) -> Sequence[str]:
        return tuple(self._pieces.roots)

    def reachability(self) -> Reachability:
        """PUBLIC once another peer has connected directly, or an address is global; PRIVATE if
        this peer does not listen or is reached only through relays."""
        if self._seen_direct_inbound:
            return Reachability.PUBLIC
        own = self._host.get_transport_addrs()
        if not own:
            return Reachability.PRIVATE
        if any(is_global(address) for address in expanded(own)):
            return Reachability.PUBLIC
        return Reachability.PRIVATE if self._relays.addresses() else Reachability.UNKNOWN

    # --- connections ---

    def connected(self) -> Sequence[PeerId]:
        return sorted(self._connections)

    def network_of(self, peer: PeerId) -> str:
        direct = [c for c in self._connections.get(peer, ()) if not c.relayed]
        return direct[0].origin.public_range if direct else ""

    def expect(self, peer: PeerId, size_bytes: int) -> None:
        for connection in self._connections.get(peer, ()):
            connection.muxed_conn.expected_bytes += size_bytes

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        await trio.lowlevel.checkpoint()
        if peer in self._connections:
            return
        if self._is_banned(peer):
            raise ConnectError(f"{peer} is banned here")
        if peer == self.peer_id:
            raise ConnectError("a peer does not connect to itself")
        failures: list[DialFailure] = []
        seconds = limits.CONNECT_DEADLINE_SECONDS
        lock = self._dialling.setdefault(peer, trio.Lock())
        try:
            with trio.move_on_after(seconds) as scope:
                async with lock:
                    for address in addresses[: limits.DIAL_ADDRESSES_MAX]:
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
        """None when connected, else the failure."""
        try:
            address, named = parse_multiaddr(text)
        except UserError:
            return DialFailure(text, "not a TCP multiaddr")
        if named is not None and named != peer:
            return DialFailure(text, "the address names another peer")
        with trio.move_on_after(limits.DIAL_DEADLINE_SECONDS) as scope:
            try:
                if "/p2p-circuit" in text:
                    await self._relays.dial(peer, text)
                else:
                    # Not host.connect: it waits 250 ms after every successful dial ("happy
                    # eyeballs"), and blocks a peer for 60 s after a failed one.
                    await self._dial_any(await resolved(address), ID.from_string(peer))
            except (ConnectError, StreamError) as error:
                return DialFailure(text, str(error))
            except BROKEN_STREAM as error:
                return dial_failure(text, error)
        if scope.cancelled_caught:
            return DialFailure(text, f"no answer within {limits.DIAL_DEADLINE_SECONDS:g} s")
        return None

    async def _dial_any(self, addresses: Sequence[Multiaddr], peer: ID) -> None:
        """Dial the addresses of one name in turn; raises what the last dial raised."""
        for address in addresses[:-1]:
            with contextlib.suppress(*BROKEN_STREAM):
                await self._swarm.dial_addr(address, peer)
                return
        await self._swarm.dial_addr(addresses[-1], peer)

    async def disconnect(self, peer: PeerId) -> None:
        for connection in list(self._connections.get(peer, ())):
            with trio.move_on_after(limits.STREAM_WRITE_SECONDS):
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
            self._pieces.came(peer)
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
                self._pieces.went(peer)
                self._emit(ConnectionEvent(peer, connected=False))

    async def _watch(self, connection: Connection) -> None:
        """Ping a connection, and close it when the other side does not answer."""
        muxed = connection.muxed_conn
        while not muxed.event_closed.is_set():
            with trio.move_on_after(limits.CONNECTION_PING_SECONDS):
                await muxed.event_closed.wait()
                return
            with trio.move_on_after(limits.CONNECTION_PONG_SECONDS) as scope:
                try:
                    await muxed.ping()
                except BROKEN_STREAM as error:
                    log.debug("pinging %s: %r", muxed.peer_id, error)
                else:
                    continue
            log.debug("%s is silent: %s", muxed.peer_id, scope.cancelled_caught)
            await connection.close()

    async def _punch(self, peer: PeerId) -> None:
        """Try to replace a relayed connection by a direct one."""
        with trio.move_on_after(limits.CONNECT_DEADLINE_SECONDS * 3):
            direct = await self._punching.initiate_hole_punch(ID.from_string(peer))
            log.debug("hole punching to %s: %s", peer, direct)

    # --- relays ---

    async def use_relay(self, address: str) -> None:
        """Let a relay carry connections to this peer until the transport ends.

        Raises `ConnectError` when the relay cannot be reached or declines now.
        """
        await self._relays.reserve(address)
        self._nursery.start_soon(self._relays.keep_reservation, address)

    # --- streams ---

    async def open_stream(
        self, peer: PeerId, protocol: str, framing: Framing = Framing.SWARM
    ) -> Stream:
        await trio.lowlevel.checkpoint()
        if peer not in self._connections:
            raise StreamError(f"stream {protocol} with {peer}: not connected")
        seconds = limits.STREAM_OPEN_DEADLINE_SECONDS
        with trio.move_on_after(seconds):
            try:
                stream = await self._host.new_stream(ID.from_string(peer), [TProtocol(protocol)])
            except StreamFailure as error:
                unknown = "not supported" in str(error.__cause__)
                why = (
                    await self._version_mismatch(peer, protocol) if unknown else "the peer reset it"
                )
                raise StreamError(f"stream {protocol} with {peer}: {why}") from error
            except BROKEN_STREAM as error:
                raise StreamError(
                    f"stream {protocol} with {peer}: the connection broke ({reason_of(error)})"
                ) from error
            return self._opened_stream(Libp2pBytes(stream), peer, protocol, framing)
        raise StreamError(f"stream {protocol} with {peer}: no answer within {seconds:g} s")

    async def _version_mismatch(self, peer: PeerId, protocol: str) -> str:
        """Explain why a peer does not speak a protocol, from the protocols it announces."""
        stem, _, version = protocol.rpartition("/")
        peer_id = ID.from_string(peer)
        spoken: list[str] = []
        with contextlib.suppress(Exception):  # the sentence is only less precise then
            if not self._host._has_cached_protocols(peer_id):  # its announcement has not come yet
                await self._host._identify_peer(peer_id, reason="unknown protocol")
            spoken = self._swarm.peerstore.get_protocols(peer_id)
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
        frame_bytes_max: int = limits.FRAME_BYTES_MAX,
    ) -> None:
        super().serve(protocol, handler, framing, frame_bytes_max=frame_bytes_max)
        self._host.set_stream_handler(TProtocol(protocol), self._on_stream)

    async def _on_stream(self, stream: INetStream) -> None:
        peer = PeerId(str(stream.muxed_conn.peer_id))
        protocol = str(stream.get_protocol())
        carrier = Libp2pBytes(stream)
        handler = self._admit_stream(peer, protocol)
        if handler is None:
            await carrier.reset()
        else:
            await self._serve_stream(carrier, peer, protocol, handler)

    # --- the piece plane ---

    async def fetch(self, source: Source, reference: BlobReference, sink: Sink) -> Piece:
        return await fetch_one(self, source, reference, sink)

    async def fetch_run(
        self, source: Source, wanted: Sequence[tuple[BlobReference, Sink]], arrived: Arrived
    ) -> None:
        await self._pieces.fetch_run(source, wanted, arrived)

    async def push(self, target: Source, reference: BlobReference, path: str) -> None:
        await self._pieces.push(target, reference, path)

    def round_trip_seconds(self, source: Source) -> float:
        return self._pieces.round_trip_seconds(source)
