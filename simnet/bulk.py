"""The bulk plane of a simulated transport: blobs that flow from disk to disk.

A fetching task sleeps once: the round trips before the first byte are one entry of the timeline. A
broadcast of 62 GB to 1,000 peers has two million of these transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import outcome
import trio

from simnet.disk import SimulatedDisk
from simnet.extents import SimulatedSink
from simnet.flows import Flow, Link
from simnet.lines import Line
from swarm.transport import (
    Arrived,
    BlobReference,
    BulkService,
    FetchError,
    OpenBlob,
    Refused,
    Source,
    refusal,
)
from swarm.transport.base import BaseTransport
from swarm.transport.http import limits as http_limits
from swarm.wire.identity import Identity, PeerId
from swarm.world import Disk, Piece, Sink, World
from swarm.world.disk import INLINE_BYTES_MAX

if TYPE_CHECKING:
    from simnet.network import SimulatedNetwork


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
        """Whether its process was killed: its remaining tasks then reach no peer."""
        self.uplink = Link(line.uplink_bytes_per_second)
        self.downlink = Link(line.downlink_bytes_per_second)
        self._network = network
        self._bulk_name = f"bulk {self.peer_id}"
        self._transfers: dict[Flow, tuple[PeerId, PeerId]] = {}
        self._admissions: dict[tuple[PeerId | None, PeerId], tuple[bytes, bool]] = {}
        """As a client: (identity shown, server) → (credential shown, whether admitted)."""
        self._round_trips: dict[PeerId, float] = {}
        """Shortest round trip so far to each server, in seconds."""

    def _forget_admission(self, server: PeerId) -> None:
        """Forget the admission at a server: the next request opens a new connection."""
        for key in [key for key in self._admissions if key[1] == server]:
            del self._admissions[key]

    def round_trip_seconds(self, source: Source) -> float:
        return self._round_trips.get(source.peer, 0.0) if source.peer else 0.0

    async def fetch_run(
        self, source: Source, wanted: Sequence[tuple[BlobReference, Sink]], arrived: Arrived
    ) -> None:
        for reference, sink in wanted:
            await arrived(await self.fetch(source, reference, sink))

    async def fetch(self, source: Source, reference: BlobReference, sink: Sink) -> Piece:
        server = await self._server(source)
        client = self.peer_id if source.peer else None
        opened: OpenBlob | None = None

        def ask() -> OpenBlob:
            nonlocal opened
            service = self._connected(server, client)
            try:
                opened = service.open(client, reference.digest)
            except Refused as refused:
                raise refusal(server.peer_id, refused.status, refused.reason) from refused
            if opened.size_bytes != reference.size_bytes:
                raise FetchError(
                    f"{server.peer_id} offers {opened.size_bytes} bytes of a blob of "
                    f"{reference.size_bytes}",
                    lacks=True,
                )
            return opened

        try:
            await _Transfer(self, server, server, self, ask).through()
            assert opened is not None
            await _copy(server, opened, self, sink, server.peer_id)
        finally:
            if opened is not None:
                opened.release()
        return sink.finish()

    async def push(self, target: Source, reference: BlobReference, path: str) -> None:
        server = await self._server(target)
        client = self.peer_id if target.peer else None
        sink: Sink | None = None
        blob = OpenBlob(path, 0, self._disk.size_bytes(path))

        def ask() -> OpenBlob:
            nonlocal sink
            service = self._connected(server, client)
            try:
                sink = service.accept(client, reference)
            except Refused as refused:
                raise refusal(server.peer_id, refused.status, refused.reason) from refused
            if blob.size_bytes != reference.size_bytes:
                raise FetchError(f"{path} has {blob.size_bytes} bytes, not {reference.size_bytes}")
            return blob

        try:
            await _Transfer(self, server, self, server, ask).through()
            assert sink is not None
            await _copy(self, blob, server, sink, server.peer_id)
            piece = sink.finish()
            if not piece.verify(reference.digest):
                raise FetchError(f"{server.peer_id} refused: 422 the bytes have another hash")
            if server._service is None:
                raise FetchError(f"{server.peer_id} broke off")
            try:
                await sink.commit(piece)
            except Refused as refused:
                raise refusal(server.peer_id, refused.status, refused.reason) from refused
        except BaseException:
            if sink is not None:
                sink.abandon()
            raise

    async def _server(self, source: Source) -> BulkPlane:
        """The peer behind a source; raises `FetchError` when no peer answers there."""
        network = self._network
        server: BulkPlane | None = None
        for address in source.addresses:
            host = address.removeprefix("http://").partition(":")[0]
            server = network.at_host(host)
            if server is not None and server.line.reachability == "public":
                break
            server = None  # behind a NAT: only over an existing connection
            if network.is_dark(host):
                await trio.sleep(http_limits.CONNECT_SECONDS)
        if server is None and source.peer is not None:
            neighbour = network.neighbour(self.peer_id, source.peer)
            if neighbour is not None:
                server = neighbour[0]
        reason = None
        if server is None or server.gone or (source.peer and server.peer_id != source.peer):
            reason = "cannot be reached"
        elif network.is_silent(self, server):
            await trio.sleep(http_limits.CONNECT_SECONDS)
            reason = "does not answer"
        if server is None or reason is not None:
            await trio.lowlevel.checkpoint()
            name = source.peer or ", ".join(source.addresses) or "a source without any address"
            raise FetchError(f"{name} {reason}")
        return server

    def _connected(self, server: BulkPlane, client: PeerId | None) -> BulkService:
        """The service of a server that the request has reached; raises `FetchError`."""
        service = server._service
        if server.gone:
            raise FetchError(f"{server.peer_id} cannot be reached")
        if service is None or server._is_banned(self.peer_id):
            raise FetchError(f"{server.peer_id} refused: 403 serves no blobs to this peer")
        credential = self._credential if client else b""
        key = (client, server.peer_id)
        held = self._admissions.get(key)
        if held is None or held[0] != credential:
            held = self._admissions[key] = (credential, service.admits(client, credential))
        if not held[1]:
            del self._admissions[key]
            raise FetchError(f"{server.peer_id} refused: 403 this peer is not admitted")
        return service


@dataclass(eq=False)
class _Transfer:
    """One blob on its way between a client and a server."""

    _client: BulkPlane
    _server: BulkPlane
    _sender: BulkPlane
    _receiver: BulkPlane
    _ask: Callable[[], OpenBlob]
    _flow: Flow | None = None
    _task: trio.lowlevel.Task | None = None

    async def through(self) -> None:
        """Ask, and wait for the end of the transfer; raises `FetchError`."""
        client, server = self._client, self._server
        network = client._network
        seconds = network.draw_latency(client, server) + network.draw_latency(server, client)
        known = client._round_trips.get(server.peer_id)
        if known is None or seconds < known:
            client._round_trips[server.peer_id] = seconds
        if (client.peer_id, server.peer_id) not in client._admissions:
            seconds *= 2  # a connection is opened first
        network.at(trio.current_time() + seconds, client._bulk_name, self._begin)
        self._task = trio.lowlevel.current_task()
        try:
            await trio.lowlevel.wait_task_rescheduled(self._abort)
        finally:
            flow = self._flow
            if flow is not None:
                del self._sender._transfers[flow], self._receiver._transfers[flow]
                network.flows.fail(flow, "given up")

    def _abort(self, raise_cancel: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _begin(self) -> None:
        if self._task is None:
            return
        try:
            blob = self._ask()
        except FetchError as error:
            self._end(error)
            return
        network, sender, receiver = self._client._network, self._sender, self._receiver
        flow = network.flows.start(sender.uplink, receiver.downlink, blob.size_bytes, self._flowed)
        self._flow = flow
        sender._transfers[flow] = receiver._transfers[flow] = (sender.peer_id, receiver.peer_id)
        if network.is_silent(sender, receiver):
            network.stall(flow)
        least = http_limits.BYTES_PER_SECOND_MIN
        if sender.uplink.bytes_per_second < least:  # other senders are only briefly that slow
            seconds = http_limits.STALL_SECONDS + blob.size_bytes / least
            too_slow = partial(network.flows.fail, flow, "was too slow")
            network.at(trio.current_time() + seconds, "stalls", too_slow)

    def _flowed(self, flow: Flow) -> None:
        if flow.failure is None:
            self._end(None)
        else:
            self._end(FetchError(f"{self._server.peer_id} {flow.failure}"))

    def _end(self, error: FetchError | None) -> None:
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(
                task, outcome.Value(None) if error is None else outcome.Error(error)
            )


async def _copy(
    sender: BulkPlane, blob: OpenBlob, receiver: BulkPlane, sink: Sink, server: PeerId
) -> None:
    """Write the transferred content to the sink: bytes, or a symbol for content without bytes."""
    disk = sender._disk
    symbol = None
    if not disk.exists(blob.path):
        raise FetchError(f"{server} broke off: its file was deleted meanwhile")
    if isinstance(disk, SimulatedDisk) and isinstance(sink, SimulatedSink):
        symbol = disk.symbol(blob.path, blob.offset, blob.size_bytes)
        if symbol is not None:  # the transfer's time includes reading the disk
            sink.land(symbol)
    done = 0 if symbol is None else blob.size_bytes
    while done < blob.size_bytes:
        size = min(blob.size_bytes - done, INLINE_BYTES_MAX)
        data = await disk.read(blob.path, blob.offset + done, size)
        if len(data) != size:
            raise FetchError(f"{server} broke off after {done + len(data)} bytes")
        sink.write(data)
        done += size
    sender.traffic.sent += blob.size_bytes
    receiver.traffic.received += blob.size_bytes
