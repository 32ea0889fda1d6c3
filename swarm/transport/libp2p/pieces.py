"""The piece plane over HTTP, or over a stream for peers without a usable address."""

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio
from multiaddr import Multiaddr

from swarm.errors import DECODE_ERRORS, DiskFullError
from swarm.transport import (
    Arrived,
    BlobReference,
    BulkService,
    FetchError,
    Refused,
    Source,
    Stream,
    StreamError,
    Traffic,
    Transport,
    limits,
    refusal,
)
from swarm.transport.http import limits as http_limits
from swarm.transport.http import messages
from swarm.transport.http.client import BulkClient
from swarm.transport.http.pace import Broken, Pace
from swarm.transport.http.server import BulkServer
from swarm.transport.http.serving import Serving, commit_push
from swarm.transport.libp2p.addresses import expanded, host_and_port, multiaddr
from swarm.wire.identity import Identity
from swarm.world import Disk, Piece, Sink

STREAM_FRAME_BYTES = 64 * 1024
"""Blob bytes per frame: one yamux frame."""

REASON_CHARACTERS_MAX = 200
"""Characters shown of a refusal's reason."""


# --- answering ---


class StreamServer:
    """Answers `BLOB_PROTOCOL` for one peer."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def serve(self, stream: Stream) -> None:
        """The handler of `BLOB_PROTOCOL`."""
        first = None
        with trio.move_on_after(http_limits.HEAD_SECONDS) as scope:
            first = await stream.receive()
        if scope.cancelled_caught:
            raise StreamError(f"{stream.peer} sent no request in time")
        try:
            try:
                ask = messages.decode_ask(first or b"")
            except DECODE_ERRORS as error:
                raise Refused(400, "the request is malformed") from error
            if len(ask.digest) != 32 or not 0 <= ask.size_bytes <= http_limits.BLOB_BYTES_MAX:
                raise Refused(400, "bad digest or size")
            service = self._serving.service()
            if not service.admits(stream.peer, ask.credential):
                raise Refused(403, "this peer is not admitted")
            if ask.push:
                await self._receive(service, stream, ask)
            else:
                await self._send(service, stream, ask)
        except Refused as refused:
            await stream.send(messages.encode(messages.Answer(refused.status, refused.reason, 0)))
        except DiskFullError:
            await stream.send(messages.encode(messages.Answer(507, "no space left", 0)))
        except Broken as broken:
            raise StreamError(f"{stream.peer} {broken}") from broken

    async def _send(self, service: BulkService, stream: Stream, ask: messages.Ask) -> None:
        blob = service.open(stream.peer, ask.digest)
        pace = Pace(blob.size_bytes, functools.partial(service.admits, stream.peer, ask.credential))
        try:
            with pace.scope:
                await stream.send(messages.encode(messages.Answer(200, "", blob.size_bytes)))
                while pace.done < blob.size_bytes:
                    size = min(STREAM_FRAME_BYTES, blob.size_bytes - pace.done)
                    await self._serving.uplink.take(size, pace)
                    data = await self._serving.disk.read(blob.path, blob.offset + pace.done, size)
                    if len(data) != size:
                        raise StreamError(f"{blob.path} is shorter than its blob")
                    await stream.send(data)
                    pace.moved()
                    self._serving.traffic.sent += size
                    pace.done += size
            if pace.scope.cancelled_caught:
                raise Broken(pace.complaint())
        finally:
            blob.release()

    async def _receive(self, service: BulkService, stream: Stream, ask: messages.Ask) -> None:
        reference = BlobReference(ask.digest, ask.size_bytes)
        sink = service.accept(stream.peer, reference)
        try:
            await stream.send(messages.encode(messages.Answer(100, "", 0)))
            still = functools.partial(service.admits, stream.peer, ask.credential)
            await _drain_into(stream, sink, ask.size_bytes, self._serving.traffic, still)
            await commit_push(reference, sink)
        except BaseException:
            sink.abandon()
            raise
        await stream.send(messages.encode(messages.Answer(204, "", 0)))


# --- asking ---


async def fetch_over_stream(
    stream: Stream, reference: BlobReference, sink: Sink, credential: bytes, traffic: Traffic
) -> Piece:
    """The client's side of a get; raises `FetchError`."""
    try:
        await stream.send(
            messages.encode(messages.Ask(False, reference.digest, reference.size_bytes, credential))
        )
        await stream.end()
        answer = await _receive_answer(stream)
        if answer.status != 200:
            raise refusal(stream.peer, answer.status, answer.reason[:REASON_CHARACTERS_MAX])
        if answer.size_bytes != reference.size_bytes:
            raise FetchError(
                f"{stream.peer} offers {answer.size_bytes} bytes of a blob of "
                f"{reference.size_bytes}"
            )
        await _drain_into(stream, sink, reference.size_bytes, traffic)
    except StreamError as error:
        raise FetchError(str(error)) from error
    finally:
        await stream.reset()
    return sink.finish()


async def push_over_stream(
    stream: Stream,
    reference: BlobReference,
    disk: Disk,
    path: str,
    credential: bytes,
    traffic: Traffic,
) -> None:
    """The client's side of a put; raises `FetchError`."""
    size = disk.size_bytes(path)
    try:
        if size != reference.size_bytes:
            raise FetchError(f"{path} has {size} bytes, not {reference.size_bytes}")
        await stream.send(messages.encode(messages.Ask(True, reference.digest, size, credential)))
        answer = await _receive_answer(stream)
        if answer.status == 100:
            for offset in range(0, size, STREAM_FRAME_BYTES):
                count = min(STREAM_FRAME_BYTES, size - offset)
                await stream.send(await disk.read(path, offset, count))
                traffic.sent += count
            await stream.end()
            answer = await _receive_answer(stream)
        if answer.status != 204:
            raise refusal(stream.peer, answer.status, answer.reason[:REASON_CHARACTERS_MAX])
    except StreamError as error:
        raise FetchError(str(error)) from error
    finally:
        await stream.reset()


async def _receive_answer(stream: Stream) -> messages.Answer:
    with trio.move_on_after(http_limits.STALL_SECONDS):
        frame = await stream.receive()
        try:
            return messages.decode_answer(frame or b"")
        except DECODE_ERRORS as error:
            raise FetchError(f"{stream.peer} answered nonsense: {error}") from error
    raise FetchError(f"{stream.peer} has sent nothing for {http_limits.STALL_SECONDS:g} s")


async def _drain_into(
    stream: Stream,
    sink: Sink,
    size_bytes: int,
    traffic: Traffic,
    still: Callable[[], bool] = lambda: True,
) -> None:
    """Receive exactly `size_bytes` in DATA frames, as long as `still()` is true."""
    pace = Pace(size_bytes, still)
    done = 0
    with pace.scope:
        while done < size_bytes:
            frame = await stream.receive()
            if frame is None or done + len(frame) > size_bytes:
                raise StreamError(f"{stream.peer} sent a wrong number of bytes")
            pace.moved()
            sink.write(frame)
            traffic.received += len(frame)
            done += len(frame)
            pace.done = done
    if pace.scope.cancelled_caught:
        raise StreamError(f"{stream.peer} {pace.complaint()}")


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
        self.streams = StreamServer(serving)
        self.client = BulkClient(
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
            for address in expanded([multiaddr(host, bound)]):
                own = host_and_port(address)[0]
                own = f"[{own}]" if ":" in own else own
                self.roots.append(f"http://{own}:{bound}")

    async def fetch_run(
        self, source: Source, wanted: Sequence[tuple[BlobReference, Sink]], arrived: Arrived
    ) -> None:
        async def ask(root: str, seconds: float) -> None:
            await self.client.fetch_run(root, source.peer, wanted, arrived, connect_seconds=seconds)

        try:
            await self._by_http(source, ask)
        except messages.Unreachable as unreachable:
            for reference, sink in wanted:
                stream = await self._blob_stream(source, unreachable)
                await arrived(
                    await fetch_over_stream(
                        stream, reference, sink, self._credential(), self._traffic
                    )
                )

    async def push(self, target: Source, reference: BlobReference, path: str) -> None:
        async def ask(root: str, seconds: float) -> None:
            await self.client.push(root, target.peer, reference, path, connect_seconds=seconds)

        try:
            await self._by_http(target, ask)
        except messages.Unreachable as unreachable:
            stream = await self._blob_stream(target, unreachable)
            await push_over_stream(
                stream, reference, self._disk, path, self._credential(), self._traffic
            )

    async def _by_http(
        self, source: Source, ask: Callable[[str, float], Awaitable[_Result]]
    ) -> _Result:
        """Call `ask(root, seconds to connect)` for the first reachable root. Raises `Unreachable`
        early enough for a stream. One that was silent lately is skipped if there is another way."""
        roots = source.addresses[: limits.DIAL_ADDRESSES_MAX]
        likely = [root for root in roots if self.client.may_reach(root, source.peer)]
        if likely or self._is_connected(source):
            roots = tuple(likely)
        name = source.peer or "a source"
        unreachable = messages.Unreachable(f"{name} has no bulk address and is not connected")
        deadline = trio.current_time() + http_limits.CONNECT_SECONDS
        for index, root in enumerate(roots):
            left = deadline - trio.current_time()
            if left <= 0:
                break  # the next request tries the remaining roots
            share = max(left / (len(roots) - index), CONNECT_SECONDS_MIN)
            try:
                return await ask(root, min(left, share))
            except messages.Unreachable as error:
                unreachable = error
        raise unreachable

    def _is_connected(self, source: Source) -> bool:
        return source.peer is not None and source.peer in self._transport.connected()

    async def _blob_stream(self, source: Source, unreachable: messages.Unreachable) -> Stream:
        """Open a stream to a source that has no HTTP address, or none that works."""
        if source.peer is None or not self._is_connected(source):
            raise unreachable
        try:
            return await self._transport.open_stream(source.peer, messages.BLOB_PROTOCOL)
        except StreamError as error:
            raise FetchError(str(error)) from error
