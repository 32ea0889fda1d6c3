"""A whole network inside one trio process, for tests: real framing and credit, no sockets.

    network = MemoryNetwork()
    async with (
        network.transport(alice, world=world, disk=disk_a) as a,
        network.transport(bob, world=world, disk=disk_b) as b,
    ):
        await a.connect(b.peer_id, b.addresses())

Everything waits on trio's clock only, so it runs under `MockClock`. Links can be cut, healed and
stalled (nothing moves, nothing breaks); a peer can be killed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from swarm.transport import (
    Arrived,
    BlobReference,
    BulkService,
    ConnectError,
    ConnectionEvent,
    DialFailure,
    FetchError,
    Framing,
    OpenBlob,
    Reachability,
    Refused,
    Source,
    Stream,
    StreamError,
    fetch_in_turn,
    limits,
    refusal,
)
from swarm.transport.base import BaseTransport
from swarm.transport.http import limits as http_limits
from swarm.wire.identity import Identity, PeerId
from swarm.world import Disk, Piece, Sink, World
from swarm.world.disk import INLINE_BYTES_MAX

_Pair = tuple[PeerId, PeerId]

CLOSED = "it closed the connection at once"


def _pair(a: PeerId, b: PeerId) -> _Pair:
    return (a, b) if a <= b else (b, a)


class _Pipe:
    """One direction of a stream."""

    def __init__(self, network: MemoryNetwork, pair: _Pair) -> None:
        self._network = network
        self._pair = pair
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._closed = False
        self._broken: str | None = None
        self._changed = trio.Event()

    def write(self, data: bytes) -> None:
        if self._broken is not None:
            raise StreamError(self._broken)
        self._chunks.append((trio.current_time() + self._network.latency_seconds, data))
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def break_(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
        self._wake()

    async def read(self) -> bytes:
        await trio.lowlevel.checkpoint()
        while True:
            if self._broken is not None:
                raise StreamError(self._broken)
            flowing = self._network.stalled.get(self._pair)
            if flowing is not None:
                await self._wait_either(flowing)
            elif not self._chunks:
                if self._closed:
                    return b""
                await self._changed.wait()
            elif self._chunks[0][0] > trio.current_time():
                await trio.sleep_until(self._chunks[0][0])
            else:
                return self._chunks.popleft()[1]

    async def _wait_either(self, flowing: trio.Event) -> None:
        """Wait until the stall is over or this pipe breaks."""
        async with trio.open_nursery() as nursery:

            async def flows() -> None:
                await flowing.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(flows)
            while self._broken is None:
                await self._changed.wait()
            nursery.cancel_scope.cancel()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class _MemoryBytes:
    """One end of a stream: a `ByteStream` of two pipes."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    async def read(self) -> bytes:
        return await self._incoming.read()

    async def write(self, data: bytes) -> None:
        self._outgoing.write(data)

    async def close_write(self) -> None:
        self._outgoing.close()

    async def reset(self) -> None:
        self.break_("reset by the other side")

    def break_(self, reason: str) -> None:
        self._incoming.break_(reason)
        self._outgoing.break_(reason)


class MemoryNetwork:
    """The peers of a network, the links between them, and the faults of those links."""

    def __init__(self, *, latency_seconds: float = 0.0) -> None:
        self.latency_seconds = latency_seconds
        self.stalled: dict[_Pair, trio.Event] = {}
        self.ranges: dict[PeerId, str] = {}
        """Public address ranges of peers, where a test sets them."""
        self.full: set[PeerId] = set()
        """Peers that close every new connection at once."""
        self.peers: dict[PeerId, MemoryTransport] = {}
        self.by_port: dict[int, MemoryTransport] = {}
        self._links: dict[_Pair, list[_MemoryBytes]] = {}
        """The streams of each live connection."""
        self._cut: set[_Pair] = set()
        self._admissions: dict[tuple[PeerId | None, PeerId], tuple[bytes, bool]] = {}
        self._next_port = 20_000

    @asynccontextmanager
    async def transport(
        self, identity: Identity, *, world: World, disk: Disk
    ) -> AsyncIterator[MemoryTransport]:
        """The transport of one peer; to the others, the end of the block is its sudden death."""
        if identity.peer_id in self.peers:
            raise ValueError(f"{identity.peer_id} is on this network already")
        async with trio.open_nursery() as nursery:
            self._next_port += 1
            transport = MemoryTransport(
                self, identity, self._next_port, world=world, disk=disk, nursery=nursery
            )
            self.peers[identity.peer_id] = transport
            self.by_port[self._next_port] = transport
            try:
                yield transport
            finally:
                self.kill(identity.peer_id)
                transport._close_subscriptions()
                nursery.cancel_scope.cancel()

    # --- faults ---

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Break the link between two peers: bytes in flight are lost, and they cannot connect."""
        self._cut.add(_pair(a, b))
        self.drop(a, b, "the connection was lost")

    def heal(self, a: PeerId, b: PeerId) -> None:
        """Undo `cut` and `stall`; the peers have to connect again."""
        self._cut.discard(_pair(a, b))
        flowing = self.stalled.pop(_pair(a, b), None)
        if flowing is not None:
            flowing.set()

    def stall(self, a: PeerId, b: PeerId) -> None:
        """Stop all bytes between two peers without breaking their link."""
        self.stalled.setdefault(_pair(a, b), trio.Event())

    def kill(self, peer: PeerId) -> None:
        """Remove a peer: others see their connections break, and nobody answers its address."""
        transport = self.peers.pop(peer, None)
        if transport is not None:
            del self.by_port[transport.port]
            for other in transport.connected():
                self.drop(peer, other, "the connection was lost")

    # --- for the transports ---

    def is_cut(self, a: PeerId, b: PeerId) -> bool:
        return _pair(a, b) in self._cut

    async def wait_flowing(self, a: PeerId, b: PeerId) -> None:
        flowing = self.stalled.get(_pair(a, b))
        if flowing is not None:
            await flowing.wait()

    def are_linked(self, a: PeerId, b: PeerId) -> bool:
        return _pair(a, b) in self._links

    def connected(self, peer: PeerId) -> list[PeerId]:
        return sorted(b if a == peer else a for a, b in self._links if peer in (a, b))

    def join(self, a: MemoryTransport, b: MemoryTransport) -> None:
        self._links[_pair(a.peer_id, b.peer_id)] = []
        a._emit(ConnectionEvent(b.peer_id, connected=True))
        b._emit(ConnectionEvent(a.peer_id, connected=True))

    def drop(self, a: PeerId, b: PeerId, reason: str) -> None:
        for key in ((a, b), (b, a)):
            self._admissions.pop(key, None)
        streams = self._links.pop(_pair(a, b), None)
        if streams is None:
            return
        for stream in streams:
            stream.break_(reason)
        for peer, other in ((a, b), (b, a)):
            transport = self.peers.get(peer)
            if transport is not None:
                transport._emit(ConnectionEvent(other, connected=False))

    def admits(
        self, client: PeerId | None, server: PeerId, service: BulkService, credential: bytes
    ) -> bool:
        """Ask the service once per connection and credential, as over HTTP."""
        held = self._admissions.get((client, server))
        if held is None or held[0] != credential:
            held = (credential, service.admits(client, credential))
            self._admissions[client, server] = held
        return held[1]

    def pipes(self, a: PeerId, b: PeerId) -> tuple[_MemoryBytes, _MemoryBytes]:
        """The two ends of a new stream on the link of a and b."""
        forth, back = _Pipe(self, _pair(a, b)), _Pipe(self, _pair(a, b))
        ends = _MemoryBytes(back, forth), _MemoryBytes(forth, back)
        self._links[_pair(a, b)].append(ends[0])
        return ends


class MemoryTransport(BaseTransport):
    """`swarm.transport.Transport` on a `MemoryNetwork`."""

    def __init__(
        self,
        network: MemoryNetwork,
        identity: Identity,
        port: int,
        *,
        world: World,
        disk: Disk,
        nursery: trio.Nursery,
    ) -> None:
        super().__init__(identity, world=world, disk=disk, nursery=nursery)
        self.port = port
        self._network = network

    def addresses(self) -> Sequence[str]:
        return (f"/ip4/127.0.0.1/tcp/{self.port}/p2p/{self.peer_id}",)

    def bulk_addresses(self) -> Sequence[str]:
        return (f"http://127.0.0.1:{self.port}",)

    async def use_relay(self, relay: PeerId, addresses: Sequence[str]) -> None:
        """Always fail: all peers reach each other here, so there is nothing to relay."""
        raise ConnectError(f"{relay} relays nothing on a memory network")

    def reachability(self) -> Reachability:
        return Reachability.PUBLIC

    def reachability_reason(self) -> str:
        return "every peer of a memory network is"

    def wants_relay(self) -> bool:
        return False

    def connected(self) -> Sequence[PeerId]:
        return self._network.connected(self.peer_id)

    def network_of(self, peer: PeerId) -> str:
        linked = self._network.are_linked(self.peer_id, peer)
        return self._network.ranges.get(peer, "") if linked else ""

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        await trio.lowlevel.checkpoint()
        if self._network.are_linked(self.peer_id, peer):
            return
        if self._is_banned(peer):
            raise ConnectError(f"{peer} is banned here")
        failures: list[DialFailure] = []
        with trio.move_on_after(limits.CONNECT_DEADLINE_SECONDS) as scope:
            if peer in self._network.full:
                closed = [
                    DialFailure(a, CLOSED, may_pass=True, turned_away=True) for a in addresses
                ]
                raise ConnectError(f"cannot connect to {peer}: {CLOSED}", closed)
            for address in addresses:
                reason = await self._dial(peer, address)
                if reason is None:
                    return
                failures.append(DialFailure(address, reason))
        reasons = [str(failure) for failure in failures]
        if scope.cancelled_caught:
            reasons.append(f"no answer within {limits.CONNECT_DEADLINE_SECONDS:g} s")
        raise ConnectError(
            f"cannot connect to {peer}: {'; '.join(reasons) or 'no address known'}", failures
        )

    async def _dial(self, peer: PeerId, address: str) -> str | None:
        """None when connected, else the reason for the failure."""
        parts = address.split("/")
        if len(parts) < 5 or parts[3] != "tcp" or not parts[4].isdecimal():
            return "not a multiaddr with a TCP port"
        if len(parts) > 6 and parts[6] != peer:
            return "the address names another peer"
        await trio.sleep(2 * self._network.latency_seconds)
        remote = self._network.by_port.get(int(parts[4]))
        if remote is None or self._network.is_cut(self.peer_id, remote.peer_id):
            return "nobody answers"
        await self._network.wait_flowing(self.peer_id, remote.peer_id)
        if remote.peer_id != peer:
            return f"{remote.peer_id} answers there"
        if remote._is_banned(self.peer_id):
            return "the peer refuses the connection"
        if not self._network.are_linked(self.peer_id, peer):
            self._network.join(self, remote)
        return None

    async def disconnect(self, peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        self._network.drop(self.peer_id, peer, "the connection was closed")

    def ban(self, peer: PeerId, seconds: float) -> None:
        self._ban(peer, seconds)
        self._network.drop(self.peer_id, peer, "the connection was closed")

    async def open_stream(
        self, peer: PeerId, protocol: str, framing: Framing = Framing.SWARM
    ) -> Stream:
        await trio.sleep(2 * self._network.latency_seconds)
        remote = self._network.peers.get(peer)
        if remote is None or not self._network.are_linked(self.peer_id, peer):
            raise StreamError(f"stream {protocol} with {peer}: not connected")
        if protocol not in remote._handlers:
            raise StreamError(f"stream {protocol} with {peer}: the peer does not speak it")
        near, far = self._network.pipes(self.peer_id, peer)
        stream = self._opened_stream(near, peer, protocol, framing)
        handler = remote._admit_stream(self.peer_id, protocol)
        if handler is None:
            await far.reset()
        else:
            remote._nursery.start_soon(
                remote._serve_stream, far, self.peer_id, protocol, handler,
                name=f"serve {protocol} {self.peer_id}",
            )  # fmt: skip
        return stream

    # --- the bulk plane ---

    def round_trip_seconds(self, source: Source) -> float:
        return 0.0

    async def fetch_run(
        self, source: Source, wanted: Sequence[tuple[BlobReference, Sink]], arrived: Arrived
    ) -> None:
        await fetch_in_turn(self, source, wanted, arrived)

    async def fetch(self, source: Source, reference: BlobReference, sink: Sink) -> Piece:
        server, service, client = await self._bulk_server(source)
        try:
            blob = service.open(client, reference.digest)
        except Refused as refused:
            raise refusal(server.peer_id, refused.status, refused.reason) from refused
        try:
            if blob.size_bytes != reference.size_bytes:
                raise FetchError(
                    f"{server.peer_id} offers {blob.size_bytes} bytes of a blob of "
                    f"{reference.size_bytes}",
                    lacks=True,
                )
            await self._copy(server, server._disk, blob, sink, sender=server, receiver=self)
        finally:
            blob.release()
        return sink.finish()

    async def push(self, target: Source, reference: BlobReference, path: str) -> None:
        server, service, client = await self._bulk_server(target)
        try:
            sink = service.accept(client, reference)
        except Refused as refused:
            raise refusal(server.peer_id, refused.status, refused.reason) from refused
        try:
            blob = OpenBlob(path, 0, self._disk.size_bytes(path))
            if blob.size_bytes != reference.size_bytes:
                raise FetchError(f"{path} has {blob.size_bytes} bytes, not {reference.size_bytes}")
            await self._copy(server, self._disk, blob, sink, sender=self, receiver=server)
            piece = sink.finish()
            if not piece.verify(reference.digest):
                raise FetchError(f"{server.peer_id} refused: 422 the bytes have another hash")
            try:
                await sink.commit(piece)
            except Refused as refused:
                raise refusal(server.peer_id, refused.status, refused.reason) from refused
        except BaseException:
            sink.abandon()
            raise

    async def _bulk_server(
        self, source: Source
    ) -> tuple[MemoryTransport, BulkService, PeerId | None]:
        """The peer behind a source, its service, and the client id that it sees."""
        await trio.sleep(self._network.latency_seconds)
        name = source.peer or ", ".join(source.addresses) or "a source without any address"
        server = self._network.peers.get(source.peer) if source.peer else None
        for address in () if source.peer else source.addresses:
            port = address.rstrip("/").rpartition(":")[2]
            server = server or (self._network.by_port.get(int(port)) if port.isdecimal() else None)
        if server is None or self._network.is_cut(self.peer_id, server.peer_id):
            raise FetchError(f"{name} cannot be reached")
        service = server._service
        if service is None or server._is_banned(self.peer_id):
            raise FetchError(f"{name} refused: 403 serves no blobs to this peer")
        client = self.peer_id if source.peer else None
        credential = self._credential if source.peer else b""
        if not self._network.admits(client, server.peer_id, service, credential):
            raise FetchError(f"{name} refused: 403 this peer is not admitted")
        return server, service, client

    async def _copy(
        self,
        server: MemoryTransport,
        disk: Disk,
        blob: OpenBlob,
        sink: Sink,
        *,
        sender: MemoryTransport,
        receiver: MemoryTransport,
    ) -> None:
        """Copy a blob's bytes, with the stall deadline of the real plane."""
        done = 0
        while done < blob.size_bytes:
            seconds = http_limits.STALL_SECONDS
            with trio.move_on_after(seconds) as scope:
                await trio.sleep(self._network.latency_seconds)
                await self._network.wait_flowing(self.peer_id, server.peer_id)
            if scope.cancelled_caught:
                raise FetchError(f"{server.peer_id} has sent nothing for {seconds:g} s")
            if self._network.peers.get(server.peer_id) is not server or self._network.is_cut(
                self.peer_id, server.peer_id
            ):
                raise FetchError(f"{server.peer_id} broke off after {done} bytes")
            # Small enough to be read without a thread: a mock clock does not wait for threads.
            size = min(blob.size_bytes - done, INLINE_BYTES_MAX)
            data = await disk.read(blob.path, blob.offset + done, size)
            if len(data) != size:
                raise FetchError(f"{server.peer_id} broke off after {done + len(data)} bytes")
            sink.write(data)
            sender.traffic.sent += size
            receiver.traffic.received += size
            done += size
