"""Targets for byte streams: HTTP on both sides, framing, yamux, negotiation."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import h11
import trio
import trio.testing
from blake3 import blake3
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectError

from swarm.transport import BlobReference, FetchError, Traffic
from swarm.transport.framing import FrameError, encode_frame, encode_varint, take_frame
from swarm.transport.http.client import Connection
from swarm.transport.http.messages import answer_head, blob_request, request_head
from swarm.transport.http.pace import Broken
from swarm.transport.http.server import Clients, Session
from swarm.transport.http.serving import Serving
from swarm.transport.http.wire import Buffers, Wire
from swarm.transport.libp2p import guard, yamux
from swarm.wire.identity import Identity
from tests.fuzz.files import folder
from tests.fuzz.target import Target
from tests.transport.harness import FolderDisk, Service, Sink
from tests.transport.hostile import ACK, DATA, FIN, MULTISTREAM, PING, RST, SYN, WINDOW, name
from tests.transport.hostile import data as yamux_data
from tests.transport.hostile import frame as yamux_frame
from tests.transport.test_negotiation import Script, answer, ask
from tests.transport.test_yamux import stranger

OWNER = Identity(bytes(32))
BLOB = bytes(range(200))
DIGEST = blake3(BLOB).digest()
ROOT = "http://127.0.0.1:8000"
SENT_BYTES_MAX = 100_000
"""Longest input: what a socket buffers while its reader has not begun."""

_buffers = Buffers()


def in_virtual_time(function: Callable[..., Awaitable[None]], *arguments: object) -> None:
    trio.run(function, *arguments, clock=trio.testing.MockClock(autojump_threshold=0))


@contextlib.asynccontextmanager
async def _wire_with(raw: bytes):
    """A wire on which the other side has said `raw` and ended; and the other side's socket."""
    near, far = socket.socketpair()
    with far:
        far.sendall(raw[:SENT_BYTES_MAX])
        far.shutdown(socket.SHUT_WR)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(near))
        wire = Wire(stream, Traffic(), _buffers)
        try:
            yield wire, far
        finally:
            wire.close()


# --- HTTP ---


def check_http_requests(raw: bytes) -> None:
    in_virtual_time(_serve, raw)


async def _serve(raw: bytes) -> None:
    """Serve one connection; the client is admitted, so that bodies are received too."""
    disk, service = FolderDisk(folder() / "disk"), Service()
    service.offer(disk, BLOB)
    serving = Serving(OWNER.peer_id, disk, lambda: service)  # type: ignore[arg-type, return-value]
    async with _wire_with(raw) as (wire, far):
        session = Session(serving, Clients(), wire, "127.0.0.1")
        with contextlib.suppress(Broken):
            await session.run()
        session.end()
        with contextlib.suppress(BlockingIOError):
            far.setblocking(False)
            said = far.recv(1 << 16)
            assert not said or said.startswith(b"HTTP/1.1 ")
    for sink in service.sinks:
        assert sink.committed != sink.abandoned, "a push neither arrived nor ended"
        assert not sink.committed or len(sink.data) == sink.size_bytes
    assert service.released <= len(service.clients)


def check_http_answers(raw: bytes) -> None:
    in_virtual_time(_fetch, raw)


async def _fetch(raw: bytes) -> None:
    """Ask for two blobs, and read whatever comes as the answers."""
    async with _wire_with(raw) as (wire, _):
        connection = Connection(wire, ROOT)
        with contextlib.suppress(FetchError, Broken, h11.RemoteProtocolError):
            await connection.request_blobs([DIGEST, DIGEST])
            for _ in range(2):
                sink = Sink(len(BLOB))
                piece = await connection.receive_blob(BlobReference(DIGEST, len(BLOB)), sink)
                assert piece.size_bytes == len(BLOB)
    async with _wire_with(raw) as (wire, _):
        connection = Connection(wire, ROOT)
        with contextlib.suppress(FetchError, Broken, h11.RemoteProtocolError):
            await connection.request(b"GET", "/checkpoint.json")
            status, size = await connection.response()
            assert 100 <= status <= 999 and size >= 0
            if status != 200:
                raise await connection.refusal(status, size)
            assert len(await connection.small_answer(size, 1000)) <= 1000


def _requests() -> list[bytes]:
    push = request_head(ROOT, b"PUT", f"/blob/{DIGEST.hex()}", [(b"content-length", b"200")])
    waits = [(b"content-length", b"200"), (b"expect", b"100-continue")]
    return [
        blob_request(ROOT, DIGEST) * 2,
        push + BLOB,
        request_head(ROOT, b"PUT", f"/blob/{DIGEST.hex()}", waits) + BLOB,
        request_head(ROOT, b"HEAD", f"/blob/{DIGEST.hex()}"),
        request_head(ROOT, b"GET", "/challenge")
        + request_head(ROOT, b"POST", "/admission", [(b"content-length", b"4")])
        + b"\x93\xa1x\xc0",
        request_head(ROOT, b"GET", "/x", [(b"connection", b"close")]),
        request_head(ROOT, b"PUT", "/x", [(b"transfer-encoding", b"chunked")]) + b"1\r\nx\r\n",
    ]


def _answers() -> list[bytes]:
    kind = b"application/octet-stream"
    return [
        (answer_head(200, 200, kind) + BLOB) * 2,
        answer_head(404, 4, b"text/plain") + b"gone",
        b"HTTP/1.1 100 Continue\r\n\r\n" + answer_head(204, 0, kind),
        b"HTTP/1.0 200 OK\r\nserver: other\r\ncontent-length: 200\r\n\r\n" + BLOB,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ]


# --- framing ---


def check_framing(raw: bytes) -> None:
    """Cut bytes into frames, in parts; the first byte chooses the parts."""
    step, stream = 1 + (raw[0] if raw else 0), raw[1:]
    buffer, rebuilt = bytearray(), b""
    for start in range(0, len(stream), step):
        buffer += stream[start : start + step]
        try:
            while (frame := take_frame(buffer, 1000)) is not None:
                assert len(frame) <= 1000
                rebuilt += encode_frame(frame)
        except FrameError:
            return
        assert len(buffer) <= 1005
        assert rebuilt + buffer == stream[: start + step]


def _framed() -> list[bytes]:
    sent = [b"hello", bytes(300), b"x", b""]
    return [b"\x06" + b"".join(map(encode_frame, sent)), b"\x00" + encode_varint(1001)]


# --- libp2p ---


def check_yamux(raw: bytes) -> None:
    """Be the muxer of a stranger's connection, which ends by `YamuxError` alone."""
    in_virtual_time(_mux, raw[:SENT_BYTES_MAX])


async def _mux(raw: bytes) -> None:
    async with stranger() as other:
        for start in range(0, len(raw), 1000):
            await other.send(raw[start : start + 1000])
            held = sum(len(stream.received) for stream in other.muxer.streams.values())
            assert other.muxer.unread_bytes == held <= yamux.MUXER_UNREAD_BYTES_MAX
            assert len(other.muxer.streams) <= yamux.MUXER_STREAMS_MAX


def check_negotiation(raw: bytes) -> None:
    """Agree on a protocol, on both sides."""
    for negotiate, refusal in ((answer, MultiselectError), (ask, MultiselectClientError)):
        for ended in (False, True):
            in_virtual_time(partial(_negotiate, negotiate, refusal, Script(raw, ended=ended)))


async def _negotiate(
    negotiate: Callable[[Script], Awaitable[str]], refusal: type[Exception], script: Script
) -> None:
    with contextlib.suppress(refusal):
        assert await negotiate(script) == "/ours/1.0.0"
    assert script.largest <= guard.NEGOTIATION_BYTES_MAX


def _frames() -> list[bytes]:
    opened = yamux_data(1, MULTISTREAM + name("/ours/1.0.0"), SYN)
    return [
        opened + yamux_data(1, b"hello", 0) + yamux_frame(WINDOW, FIN, 1, 0),
        opened + yamux_frame(WINDOW, 0, 1, 70_000) + yamux_frame(WINDOW, RST, 1, 0),
        yamux_frame(PING, SYN, 0, 7) + yamux_frame(PING, ACK, 0, 7),
        b"".join(yamux_frame(DATA, SYN, number, 0) for number in range(1, 40, 2)),
        yamux_data(3, bytes(3000), SYN),
    ]


def _negotiations() -> list[bytes]:
    return [
        MULTISTREAM + name("/ours/1.0.0"),
        MULTISTREAM + name("ls") + name("/theirs/1.0.0") + name("/ours/1.0.0"),
        MULTISTREAM + name("na"),
        MULTISTREAM * 40,
    ]


TARGETS = [
    Target("http-requests", check_http_requests, _requests),
    Target("http-answers", check_http_answers, _answers),
    Target("framing", check_framing, _framed),
    Target("yamux", check_yamux, _frames),
    Target("negotiation", check_negotiation, _negotiations),
]
