"""The bulk plane of a simulated transport: blobs that flow from disk to disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from simnet.disk import SimulatedDisk, SimulatedSink
from simnet.flows import Flow, Link
from swarm import defaults
from swarm.identity import Identity, PeerId
from swarm.transport import (
    BlobReference,
    BulkService,
    FetchError,
    OpenBlob,
    Refused,
    Source,
)
from swarm.transport.base import BaseTransport
from swarm.world import Disk, Piece, Sink, World

if TYPE_CHECKING:
    from simnet.network import Line, SimulatedNetwork


class BulkPlane(BaseTransport):
    """`fetch` and `push` of `swarm.transport.Transport`, as fluid transfers."""

    def __init__(
        self,
        network: SimulatedNetwork,
        identity: Identity,
        host: str,
        line: Line,
        *,
        world: World,
        disk: Disk,
        nursery: trio.Nursery,
    ) -> None:
        super().__init__(identity, world=world, disk=disk, nursery=nursery)
        self.host = host
        self.line = line
        self.gone = False
        """Killed: what its tasks still do reaches nobody."""
        self._network = network
        self._uplink = Link(line.uplink_bytes_per_second)
        self._downlink = Link(line.downlink_bytes_per_second)
        self._transfers: dict[Flow, tuple[PeerId, PeerId]] = {}
        self._admissions: dict[tuple[PeerId | None, PeerId], tuple[bytes, bool]] = {}
        """As a client: (who we said we are, server) → (credential shown, whether admitted)."""

    def _forget_admission(self, server: PeerId) -> None:
        """The next request to this server opens a connection."""
        for key in [key for key in self._admissions if key[1] == server]:
            del self._admissions[key]

    async def fetch(self, source: Source, reference: BlobReference, sink: Sink) -> Piece:
        server, service, client = await self._bulk_server(source)
        try:
            blob = service.open(client, reference.digest)
        except Refused as refused:
            raise _refusal(server.peer_id, refused) from refused
        try:
            if blob.size_bytes != reference.size_bytes:
                raise FetchError(
                    f"{server.peer_id} offers {blob.size_bytes} bytes of a blob of "
                    f"{reference.size_bytes}"
                )
            await self._transfer(server, self, server.peer_id, blob, sink)
        finally:
            blob.release()
        return sink.finish()

    async def push(self, target: Source, reference: BlobReference, path: str) -> None:
        server, service, client = await self._bulk_server(target)
        try:
            sink = service.accept(client, reference)
        except Refused as refused:
            raise _refusal(server.peer_id, refused) from refused
        try:
            blob = OpenBlob(path, 0, self._disk.size_bytes(path))
            if blob.size_bytes != reference.size_bytes:
                raise FetchError(f"{path} has {blob.size_bytes} bytes, not {reference.size_bytes}")
            await self._transfer(self, server, server.peer_id, blob, sink)
            piece = sink.finish()
            if not piece.verify(reference.digest):
                raise FetchError(f"{server.peer_id} refused: 422 the bytes have another hash")
            try:
                await service.received(client, reference, sink, piece)
            except Refused as refused:
                raise _refusal(server.peer_id, refused) from refused
        except BaseException:
            sink.abandon()
            raise

    async def _bulk_server(self, source: Source) -> tuple[BulkPlane, BulkService, PeerId | None]:
        """The peer behind a source, its service, and who we are to it; one round trip, or two
        where no connection is kept."""
        network = self._network
        await trio.lowlevel.checkpoint()
        name = source.peer or ", ".join(source.addresses) or "a source without any address"
        server: BulkPlane | None = None
        for address in source.addresses:
            host = address.removeprefix("http://").partition(":")[0]
            server = server or network.at_host(host)
            if server is None and network.is_dark(host):
                await trio.sleep(defaults.BULK_CONNECT_SECONDS)
        if server is None and source.peer is not None:
            server = network.neighbour(self.peer_id, source.peer)
        if server is None or server.gone or (source.peer and server.peer_id != source.peer):
            raise FetchError(f"{name} cannot be reached")
        client = self.peer_id if source.peer else None
        credential = self._credential if source.peer else b""
        key = (client, server.peer_id)
        held = self._admissions.get(key)
        for _ in range(2 if held is None else 1):
            if network.is_silent(self, server):
                await trio.sleep(defaults.BULK_CONNECT_SECONDS)
                raise FetchError(f"{name} does not answer")
            await trio.sleep(network.draw_latency(self, server))
            await trio.sleep(network.draw_latency(server, self))
        service = server._service
        if server.gone:
            raise FetchError(f"{name} cannot be reached")
        if service is None or server._is_banned(self.peer_id):
            raise FetchError(f"{name} refused: 403 serves no blobs to this peer")
        if held is None or held[0] != credential:
            held = self._admissions[key] = (credential, service.admits(client, credential))
        if not held[1]:
            del self._admissions[key]
            raise FetchError(f"{name} refused: 403 this peer is not admitted")
        return server, service, client

    async def _transfer(
        self,
        sender: BulkPlane,
        receiver: BulkPlane,
        server: PeerId,
        blob: OpenBlob,
        sink: Sink,
    ) -> None:
        """Let a blob flow from one disk to the other."""
        flows = self._network.flows
        flow = flows.start(sender._uplink, receiver._downlink, blob.size_bytes)
        ends = (sender.peer_id, receiver.peer_id)
        sender._transfers[flow] = receiver._transfers[flow] = ends
        if self._network.is_silent(sender, receiver):
            self._network._stall(flow)
        try:
            await flow.ended.wait()
        finally:
            del sender._transfers[flow], receiver._transfers[flow]
            flows.fail(flow, "given up")
        if flow.failure is not None:
            raise FetchError(f"{server} {flow.failure}")
        await self._copy(sender, blob, sink, server)
        sender._traffic.sent += blob.size_bytes
        receiver._traffic.received += blob.size_bytes

    @staticmethod
    async def _copy(sender: BulkPlane, blob: OpenBlob, sink: Sink, server: PeerId) -> None:
        """What has flowed lands in the sink: bytes, or a symbol where there are none."""
        disk = sender._disk
        if isinstance(disk, SimulatedDisk) and isinstance(sink, SimulatedSink):
            symbol = disk.symbol(blob.path, blob.offset, blob.size_bytes)
            if symbol is not None:  # the disk was read while it flowed: no time on top
                sink.land(symbol)
                return
        done = 0
        while done < blob.size_bytes:
            size = min(blob.size_bytes - done, defaults.DISK_INLINE_BYTES_MAX)
            data = await disk.read(blob.path, blob.offset + done, size)
            if len(data) != size:
                raise FetchError(f"{server} broke off after {done + len(data)} bytes")
            sink.write(data)
            done += size


def _refusal(peer: PeerId, refused: Refused) -> FetchError:
    """A refusal as the client sees it; 404, 429 and 503 may pass with time."""
    return FetchError(
        f"{peer} refused: {refused.status} {refused.reason}",
        retry=refused.status in defaults.BULK_RETRY_STATUSES,
    )
