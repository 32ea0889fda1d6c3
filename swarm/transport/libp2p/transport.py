"""`Libp2pTransport`: the seam of `swarm.transport` on libp2p."""

import contextlib
import functools
import ipaddress
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import StreamFailure
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from multiaddr import Multiaddr

from swarm.errors import UserError
from swarm.transport import (
    Arrived,
    BlobReference,
    BlobTransport,
    ConnectError,
    ConnectionEvent,
    DialFailure,
    Reachability,
    Source,
    Stream,
    StreamError,
    limits,
)
from swarm.transport.base import BaseTransport
from swarm.transport.framing import FramedStream
from swarm.transport.http.messages import BLOB_PROTOCOL
from swarm.transport.http.pace import Uplink
from swarm.transport.http.serving import Serving
from swarm.transport.libp2p.addresses import (
    CIRCUIT,
    Announced,
    by_relay,
    dial_failure,
    expanded,
    host_and_port,
    is_global,
    may_be_global,
    multiaddr,
    parse_multiaddr,
    resolved,
    without_peer,
)
from swarm.transport.libp2p.connections import Connection, Host, TamedSwarm
from swarm.transport.libp2p.dial_back import FRAME_BYTES_MAX as DIAL_BACK_FRAME_BYTES_MAX
from swarm.transport.libp2p.dial_back import PROTOCOL as DIAL_BACK_PROTOCOL
from swarm.transport.libp2p.dial_back import DialBack
from swarm.transport.libp2p.guard import BROKEN, reason_of
from swarm.transport.libp2p.pieces import PiecePlane
from swarm.transport.libp2p.reach import Reach
from swarm.transport.libp2p.relays import Relays
from swarm.wire.identity import Identity, PeerId
from swarm.world import Disk, Sink, World

log = logging.getLogger(__name__)

BROKEN_STREAM = (*BROKEN, ValueError)
"""A broken connection or stream, or nonsense on it. Other exceptions are our defects."""

DIAL_STAGGER_SECONDS = 0.25
"""Head start of each address before the next one (RFC 8305)."""

DIRECT_SECONDS = 4.0
"""Limit on all direct addresses of a peer that has relays; then these are asked."""

PRIVATE_SECONDS = 1.0
"""The same for a peer that has only private addresses: it answers soon, or is elsewhere."""

READ_BYTES = 1 << 20
"""Bytes read from a stream at once."""


@contextlib.contextmanager
def _breaking() -> Iterator[None]:
    try:
        yield
    except BROKEN_STREAM as error:
        raise StreamError(f"the connection broke ({type(error).__name__})") from error


def _head_start(direct: Sequence[str], relayed: Sequence[str]) -> float:
    """The time for a peer's direct addresses before its relays are asked."""
    if not relayed:
        return limits.CONNECT_DEADLINE_SECONDS
    return DIRECT_SECONDS if any(map(may_be_global, direct)) else PRIVATE_SECONDS


class Libp2pBytes:
    def __init__(self, stream: INetStream) -> None:
        self._stream = stream
        self._muxed = stream.muxed_stream  # libp2p's stream adds four locks to each message
        self._read_closed = False
        self._write_closed = False

    async def read(self) -> bytes:
        with _breaking():
            try:
                return bytes(await self._muxed.read(READ_BYTES))
            except MuxedStreamEOF:
                self._read_closed = True
        if self._write_closed:
            await self._forget()
        return b""

    async def write(self, data: bytes) -> None:
        with trio.move_on_after(limits.STREAM_SEND_DEADLINE_SECONDS):
            with _breaking():
                await self._muxed.write(data)
            return
        await self.reset()
        raise StreamError(f"has not read for {limits.STREAM_SEND_DEADLINE_SECONDS:g} s")

    async def close_write(self) -> None:
        self._write_closed = True
        with _breaking():
            await self._muxed.close()
        if self._read_closed:
            await self._forget()

    async def reset(self) -> None:
        with trio.move_on_after(limits.CLOSE_SECONDS, shield=True):
            try:
                await self._stream.reset()
            except BROKEN_STREAM as error:
                log.debug("resetting a stream: %r", error)

    async def _forget(self) -> None:
        """Drop libp2p's entry of a stream that has ended; libp2p itself keeps it."""
        with trio.move_on_after(limits.STREAM_WRITE_SECONDS, shield=True):
            await self._stream.remove()


class Libp2pTransport(BaseTransport, BlobTransport):
    """`swarm.transport.Transport` on libp2p. Made by `open_libp2p`."""

    def __init__(
        self,
        identity: Identity,
        host: Host,
        uplink: Uplink,
        announced: Announced,
        *,
        world: World,
        disk: Disk,
        nursery: trio.Nursery,
    ) -> None:
        super().__init__(identity, world=world, disk=disk, nursery=nursery)
        self._host = host
        self._swarm: TamedSwarm = host.get_network()
        self._connections: dict[PeerId, list[Connection]] = {}
        self._relays = Relays(host, self)
        self._dialling: dict[PeerId, trio.Lock] = {}
        self._announced = announced
        events = self._swarm.guard.events
        self.reach = Reach(
            self, self._seen_at, self._ports, announced.ports(), self._own_hosts, world, events
        )
        if not host.get_transport_addrs():
            self.reach.conclude_deaf()
        back = DialBack(self._swarm.handshake, self._seen_at, world.now)
        self.serve(DIAL_BACK_PROTOCOL, back.serve, frame_bytes_max=DIAL_BACK_FRAME_BYTES_MAX)
        self._swarm.upgrader.proved = self.reach.note_handshake
        self._swarm.tcp.source_for = self.dial_source
        host.addresses = self.addresses
        host.punching.seen = lambda: self.reach.seen
        serving = Serving(
            identity.peer_id,
            disk,
            lambda: self._service,
            self.traffic,
            uplink,
            trusts=self._is_trusted,
        )
        self._pieces = PiecePlane(identity, serving, lambda: self._credential, self)
        self.serve(BLOB_PROTOCOL, self._pieces.streams.serve)
        self._swarm.refuses = self._is_banned
        self._swarm.vouches = self._is_vouched
        self._swarm.trusts = self._is_trusted
        self._swarm.opened, self._swarm.closed = self._on_connected, self._on_disconnected

    async def listen_http(self, addresses: Sequence[Multiaddr], port: int) -> None:
        """Serve blobs on the interfaces of `addresses`; once, before anything else."""
        await self._pieces.listen(addresses, port, self._nursery)

    async def close(self) -> None:
        self._close_subscriptions()
        self._pieces.client.close()
        async with trio.open_nursery() as nursery:
            for peer in list(self._connections):
                nursery.start_soon(self.disconnect, peer)

    # --- addresses ---

    def addresses(self) -> Sequence[str]:
        direct = list(self._announced.addresses)
        if self._announced.detected:
            direct += [f"{multiaddr(*place)}" for place in self.reach.outside]
            direct += map(without_peer, expanded(self._host.get_transport_addrs()))
        result = [f"{address}/p2p/{self.peer_id}" for address in dict.fromkeys(direct)]
        for relay in self._relays.addresses():
            result.append(f"{relay}/p2p-circuit/p2p/{self.peer_id}")
        return tuple(result)

    def bulk_addresses(self) -> Sequence[str]:
        detected = self._pieces.roots if self._announced.detected else ()
        return tuple(dict.fromkeys([*self._announced.bulk, *detected]))

    def reachability(self) -> Reachability:
        return self.reach.state

    def reachability_reason(self) -> str:
        return self.reach.how

    def wants_relay(self) -> bool:
        return self.reach.wants_relay

    def _seen_at(self, peer: PeerId) -> tuple[str, int] | None:
        for connection in self._connections.get(peer, ()):
            seen = None if connection.relayed else connection.muxed_conn.get_remote_address()
            if seen is not None:
                return str(seen[0]), int(seen[1])
        return None

    def _ports(self) -> list[int]:
        return list(dict.fromkeys(host_and_port(a)[1] for a in self._host.get_transport_addrs()))

    def _own_hosts(self) -> set[str]:
        return {host_and_port(a)[0] for a in expanded(self._host.get_transport_addrs())}

    def dial_source(self, host: str) -> tuple[str, int] | None:
        """The listener from which to dial a global address, so that a NAT maps its port; None to
        dial from any port, as peers do that others reach without a NAT."""
        name = "::" if ":" in host else "0.0.0.0"
        if self.reach.state is Reachability.PUBLIC or not ipaddress.ip_address(host).is_global:
            return None
        for address in self._host.get_transport_addrs():
            own, port = host_and_port(address)
            if own == name and not any(is_global(a) for a in expanded([address])):
                return own, port
        return None

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
        lock = self._dialling.setdefault(peer, trio.Lock())
        direct = [address for address in addresses if CIRCUIT not in address]
        relayed = [address for address in addresses if CIRCUIT in address]
        try:
            with trio.move_on_after(limits.CONNECT_DEADLINE_SECONDS) as scope:
                async with lock:
                    # Through a relay only if no direct connection comes about.
                    seconds = _head_start(direct, relayed)
                    if await self._race(peer, [[each] for each in direct], failures, seconds):
                        return
                    seconds = limits.DIAL_DEADLINE_SECONDS
                    if await self._race(peer, by_relay(relayed), failures, seconds):
                        return
        finally:
            if not lock.locked():
                self._dialling.pop(peer, None)
        own = f"/p2p/{peer}"  # which the sentence names already
        reasons = [f"{each.address.removesuffix(own)}: {each.reason}" for each in failures]
        if scope.cancelled_caught:
            reasons.append(f"no answer within {limits.CONNECT_DEADLINE_SECONDS:g} s")
        raise ConnectError(
            f"cannot connect to {peer}: {'; '.join(reasons) or 'no address known'}", failures
        )

    async def _race(
        self,
        peer: PeerId,
        ways: Sequence[Sequence[str]],
        failures: list[DialFailure],
        seconds: float,
    ) -> bool:
        """Try ways (a direct address, or those through one relay), each a moment after the one
        before or once that has failed; whether connected. One silent address delays none."""

        async def attempt(way: Sequence[str], done: trio.Event) -> None:
            failure = await self._try_way(peer, way)
            if failure is None:
                nursery.cancel_scope.cancel()
            else:
                failures.append(failure)
            done.set()

        if peer in self._connections:
            return True
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for way in ways[: limits.DIAL_ADDRESSES_MAX]:
                    failed = trio.Event()
                    nursery.start_soon(attempt, way, failed)
                    with trio.move_on_after(DIAL_STAGGER_SECONDS):
                        await failed.wait()
        return peer in self._connections

    async def _try_way(self, peer: PeerId, way: Sequence[str]) -> DialFailure | None:
        """None when connected, else the failure."""
        text = way[0]
        try:
            address, named = parse_multiaddr(text)
        except UserError:
            return DialFailure(text, "not a TCP multiaddr")
        if named is not None and named != peer:
            return DialFailure(text, "the address names another peer")
        with trio.move_on_after(limits.DIAL_DEADLINE_SECONDS) as scope:
            try:
                if CIRCUIT in text:
                    await self._relays.dial(peer, way)
                else:
                    # Not host.connect: it waits 250 ms after every successful dial ("happy
                    # eyeballs"), and blocks a peer for 60 s after a failed one.
                    await self._dial_any(await resolved(address), ID.from_string(peer))
            except (ConnectError, StreamError) as error:
                return DialFailure(text, str(error))
            except BROKEN_STREAM as error:
                return dial_failure(text, error)
        if scope.cancelled_caught:
            silent = f"no answer within {limits.DIAL_DEADLINE_SECONDS:g} s"
            return DialFailure(text, silent, may_pass=True)
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
            self._pieces.client.forget(peer)  # its roots are worth trying again
        relayed = connection.relayed
        inbound = not connection.muxed_conn.is_initiator
        if not (relayed or was_direct or first) and self._host.punching.is_at_work(peer):
            self.reach.note_punched(peer)
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
                self._emit(ConnectionEvent(peer, connected=False))

    async def _watch(self, connection: Connection) -> None:
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
        with trio.move_on_after(limits.CONNECT_DEADLINE_SECONDS * 3):
            with contextlib.suppress(*BROKEN_STREAM, trio.TooSlowError):
                # Its addresses: a plain connection to one of them needs no hole.
                await self._host._identify_peer(ID.from_string(peer), reason="hole punching")
            direct = await self._host.punching.initiate_hole_punch(ID.from_string(peer))
            log.debug("hole punching to %s: %s", peer, direct)

    async def trim(self) -> None:
        """Close idle connections beyond those kept, until cancelled."""
        most = self._swarm.connections_max
        await self._trim(lambda: self._swarm.trim(self._kept(most)))

    # --- relays ---

    async def use_relay(self, relay: PeerId, addresses: Sequence[str]) -> None:
        """See `Transport.use_relay`."""
        await self._relays.reserve(relay, addresses)
        self._nursery.start_soon(self._relays.keep_reservation, relay, addresses)

    def is_served_by(self, relay: ID) -> bool:
        """Whether a relay holds a reservation for this peer."""
        return self._relays.holds(PeerId(str(relay)))

    # --- streams ---

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
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
                    "the peer does not speak it: it is still starting, its Swarm is of another "
                    "version, or it is no peer of Swarm"
                    if unknown
                    else "the peer reset it"
                )
                raise StreamError(f"stream {protocol} with {peer}: {why}") from error
            except BROKEN_STREAM as error:
                raise StreamError(
                    f"stream {protocol} with {peer}: the connection broke ({reason_of(error)})"
                ) from error
            carrier, held = Libp2pBytes(stream), self._on_held
            return FramedStream(carrier, peer=peer, protocol=protocol, on_held=held)
        raise StreamError(f"stream {protocol} with {peer}: no answer within {seconds:g} s")

    def serve(
        self, protocol: str, handler: Any, *, frame_bytes_max: int = limits.FRAME_BYTES_MAX
    ) -> None:
        super().serve(protocol, handler, frame_bytes_max=frame_bytes_max)
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

    async def fetch_run(
        self, source: Source, wanted: Sequence[tuple[BlobReference, Sink]], arrived: Arrived
    ) -> None:
        await self._pieces.fetch_run(source, wanted, arrived)

    async def push(self, target: Source, reference: BlobReference, path: str) -> None:
        await self._pieces.push(target, reference, path)

    def round_trip_seconds(self, source: Source) -> float:
        return self._pieces.client.round_trip_seconds(source.addresses)
