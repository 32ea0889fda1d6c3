"""The piece plane over a stream, for peers without a usable HTTP address: both sides of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import trio

from swarm.errors import DECODE_ERRORS, DiskFullError
from swarm.transport import (
    BlobReference,
    BulkService,
    FetchError,
    Refused,
    Stream,
    StreamError,
    Traffic,
    refusal,
)
from swarm.transport.http import limits
from swarm.transport.http.messages import Answer, Ask, decode_answer, decode_ask, encode
from swarm.transport.http.pace import Broken, Pace
from swarm.transport.http.serving import Serving, commit_push
from swarm.wire.identity import PeerId
from swarm.world import Disk, Piece, Sink

STREAM_FRAME_BYTES = 64 * 1024
"""Blob bytes per frame: one yamux frame."""

REASON_CHARACTERS_MAX = 200
"""Characters shown of a refusal's reason."""


# --- answering ---


class _Admission(NamedTuple):
    """The last answer of `BulkService.admits` about a client on streams."""

    credential: bytes
    asked_at: float
    admitted: bool


class StreamServer:
    """Answers `BLOB_PROTOCOL` for one peer."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._admissions: dict[PeerId, _Admission] = {}

    async def serve(self, stream: Stream) -> None:
        """The handler of `BLOB_PROTOCOL`."""
        first = None
        with trio.move_on_after(limits.HEAD_SECONDS) as scope:
            first = await stream.receive()
        if scope.cancelled_caught:
            raise StreamError(f"{stream.peer} sent no request in time")
        try:
            ask = _ask_of(first)
            service = self._serving.service()
            self._admit(service, stream.peer, ask.credential)
            if ask.push:
                await self._receive(service, stream, ask)
            else:
                await self._send(service, stream, ask)
        except Refused as refused:
            await stream.send(encode(Answer(refused.status, refused.reason, 0)))
        except DiskFullError:
            await stream.send(encode(Answer(507, "no space left", 0)))
        except Broken as broken:
            raise StreamError(f"{stream.peer} {broken}") from broken

    def forget(self, peer: PeerId) -> None:
        """Forget a peer whose connection ended: on the next one its admission is checked again."""
        self._admissions.pop(peer, None)

    def _admit(self, service: BulkService, peer: PeerId, credential: bytes) -> None:
        now = trio.current_time()
        held = self._admissions.get(peer)
        if (
            held is None
            or held.credential != credential
            or now - held.asked_at > limits.ADMITTED_SECONDS
        ):
            held = _Admission(credential, now, service.admits(peer, credential))
            self._admissions[peer] = held
        if not held.admitted:
            raise Refused(403, "this peer is not admitted")

    async def _send(self, service: BulkService, stream: Stream, ask: Ask) -> None:
        blob = service.open(stream.peer, ask.digest)
        still = functools.partial(service.admits, stream.peer, ask.credential)
        pace = Pace(blob.size_bytes, still)
        try:
            with pace.scope:
                await stream.send(encode(Answer(200, "", blob.size_bytes)))
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

    async def _receive(self, service: BulkService, stream: Stream, ask: Ask) -> None:
        reference = BlobReference(ask.digest, ask.size_bytes)
        sink = service.accept(stream.peer, reference)
        try:
            await stream.send(encode(Answer(100, "", 0)))
            still = functools.partial(service.admits, stream.peer, ask.credential)
            await _drain_into(stream, sink, ask.size_bytes, self._serving.traffic, still)
            await commit_push(reference, sink)
        except BaseException:
            sink.abandon()
            raise
        await stream.send(encode(Answer(204, "", 0)))


def _ask_of(frame: bytes | None) -> Ask:
    try:
        ask = decode_ask(frame or b"")
    except DECODE_ERRORS as error:
        raise Refused(400, "the request is malformed") from error
    if len(ask.digest) != 32 or not 0 <= ask.size_bytes <= limits.BLOB_BYTES_MAX:
        raise Refused(400, "bad digest or size")
    return ask


# --- asking ---


async def fetch_over_stream(
    stream: Stream, reference: BlobReference, sink: Sink, credential: bytes, traffic: Traffic
) -> Piece:
    """The client's side of a get; raises `FetchError`."""
    try:
        await stream.send(encode(Ask(False, reference.digest, reference.size_bytes, credential)))
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
        await stream.send(encode(Ask(True, reference.digest, size, credential)))
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


async def _receive_answer(stream: Stream) -> Answer:
    with trio.move_on_after(limits.STALL_SECONDS):
        frame = await stream.receive()
        try:
            return decode_answer(frame or b"")
        except DECODE_ERRORS as error:
            raise FetchError(f"{stream.peer} answered nonsense: {error}") from error
    raise FetchError(f"{stream.peer} has sent nothing for {limits.STALL_SECONDS:g} s")


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
