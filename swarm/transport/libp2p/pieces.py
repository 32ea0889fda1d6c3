"""The piece plane of a libp2p peer: over HTTP, or over a stream where HTTP does not work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio
from multiaddr import Multiaddr

from swarm.transport import (
    Arrived,
    BlobReference,
    FetchError,
    Source,
    Stream,
    StreamError,
    Transport,
    limits,
)
from swarm.transport.http import limits as http_limits
from swarm.transport.http.client import BulkClient
from swarm.transport.http.messages import BLOB_PROTOCOL, Unreachable
from swarm.transport.http.over_stream import StreamServer, fetch_over_stream, push_over_stream
from swarm.transport.http.server import BulkServer
from swarm.transport.http.serving import Serving
from swarm.transport.libp2p.addresses import expanded, host_and_port
from swarm.wire.identity import Identity, PeerId
from swarm.world import Sink

CONNECT_SECONDS_MIN = 1.0
"""Time given to each of several HTTP addresses, at least: a few round trips."""

_Result = TypeVar("_Result")


class PiecePlane:
    """Serves, fetches and pushes blobs."""

    def __init__(
        self,
        identity: Identity,
        serving: Serving,
        credential: Callable[[], bytes],
        transport: Transport,
    ) -> None:
        """`transport` opens streams to peers without HTTP."""
        self._disk = serving.disk
        self._traffic = serving.traffic
        self._credential = credential
        self._transport = transport
        self._server = BulkServer(serving)
        self._stream_server = StreamServer(serving)
        self._client = BulkClient(
            identity, serving.disk, credential, serving.traffic, uplink=serving.uplink
        )
        self.roots: list[str] = []
        """This peer's `http://host:port` addresses."""

    async def listen(
        self, addresses: Sequence[Multiaddr], port: int, nursery: trio.Nursery
    ) -> None:
        """Serve HTTP on the interfaces that libp2p listens on."""
        for host in dict.fromkeys(host_and_port(address)[0] for address in addresses):
            listeners = await trio.open_tcp_listeners(port, host=host)
            bound = listeners[0].socket.getsockname()[1]
            nursery.start_soon(self._server.serve, listeners)
            name = "ip6" if ":" in host else "ip4"
            for address in expanded([Multiaddr(f"/{name}/{host}/tcp/{bound}")]):
                own = host_and_port(address)[0]
                own = f"[{own}]" if ":" in own else own
                self.roots.append(f"http://{own}:{bound}")

    async def serve_stream(self, stream: Stream) -> None:
        """The handler of `BLOB_PROTOCOL`."""
        await self._stream_server.serve(stream)

    def close(self) -> None:
        self._client.pool.close()

    def came(self, peer: PeerId) -> None:
        """Note that a peer has connected: its HTTP addresses are worth trying again."""
        self._client.pool.forget(peer)

    def went(self, peer: PeerId) -> None:
        """Note that a peer's connection ended: on the next one its admission is checked again."""
        self._stream_server.forget(peer)

    async def fetch_run(
        self, source: Source, wanted: Sequence[tuple[BlobReference, Sink]], arrived: Arrived
    ) -> None:
        async def ask(root: str, seconds: float) -> None:
            await self._client.fetch_run(
                root, source.peer, wanted, arrived, connect_seconds=seconds
            )

        try:
            await self._by_http(source, ask)
        except Unreachable as unreachable:
            for reference, sink in wanted:
                stream = await self._blob_stream(source, unreachable)
                await arrived(
                    await fetch_over_stream(
                        stream, reference, sink, self._credential(), self._traffic
                    )
                )

    def round_trip_seconds(self, source: Source) -> float:
        return self._client.pool.round_trip_seconds(source.addresses)

    async def push(self, target: Source, reference: BlobReference, path: str) -> None:
        async def ask(root: str, seconds: float) -> None:
            await self._client.push(root, target.peer, reference, path, connect_seconds=seconds)

        try:
            await self._by_http(target, ask)
        except Unreachable as unreachable:
            stream = await self._blob_stream(target, unreachable)
            await push_over_stream(
                stream, reference, self._disk, path, self._credential(), self._traffic
            )

    async def _by_http(
        self, source: Source, ask: Callable[[str, float], Awaitable[_Result]]
    ) -> _Result:
        """Call `ask(root, seconds to connect)` for the first reachable root of a source.

        Raises `Unreachable` when none can be reached, early enough for a stream to be tried. A
        root that did not answer lately is skipped if there is another root, or a connection to the
        peer.
        """
        roots = source.addresses[: limits.DIAL_ADDRESSES_MAX]
        likely = [root for root in roots if self._client.pool.may_reach(root, source.peer)]
        if likely or self._is_connected(source):
            roots = tuple(likely)
        name = source.peer or "a source"
        unreachable = Unreachable(f"{name} has no bulk address and is not connected")
        deadline = trio.current_time() + http_limits.CONNECT_SECONDS
        for index, root in enumerate(roots):
            left = deadline - trio.current_time()
            if left <= 0:
                break  # the next request tries the remaining roots
            share = max(left / (len(roots) - index), CONNECT_SECONDS_MIN)
            try:
                return await ask(root, min(left, share))
            except Unreachable as error:
                unreachable = error
        raise unreachable

    def _is_connected(self, source: Source) -> bool:
        return source.peer is not None and source.peer in self._transport.connected()

    async def _blob_stream(self, source: Source, unreachable: Unreachable) -> Stream:
        """Open a stream to a source that has no HTTP address, or none that works."""
        if source.peer is None or not self._is_connected(source):
            raise unreachable
        try:
            return await self._transport.open_stream(source.peer, BLOB_PROTOCOL)
        except StreamError as error:
            raise FetchError(str(error)) from error
