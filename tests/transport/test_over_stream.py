"""Blobs over a stream, asked for by peers that lie, stall and trickle; in memory, virtual time."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from swarm.shardcast import limits as checkpoint_limits
from swarm.shardcast.fetch import job
from swarm.transport import FetchError, Stream, StreamError, Traffic
from swarm.transport.http import limits
from swarm.transport.http.messages import BLOB_PROTOCOL, Answer, Ask
from swarm.transport.http.pace import Pace, Uplink
from swarm.transport.http.serving import Serving
from swarm.transport.libp2p import pieces
from swarm.transport.libp2p.pieces import StreamServer, fetch_over_stream
from tests.memory_network import MemoryNetwork
from tests.worlds import VirtualWorld

from .harness import ALICE, BOB, FolderDisk, Service, Sink

DATA = bytes(4 << 20)


@asynccontextmanager
async def asked_by_alice(
    folder: Path, uplink: Uplink | None = None
) -> AsyncIterator[tuple[Callable[[], Awaitable[Stream]], Service, FolderDisk]]:
    """What opens a blob stream to Bob, Bob's service and his disk."""
    network = MemoryNetwork()
    disk = FolderDisk(folder)
    service = Service()
    serving = Serving(BOB.peer_id, disk, lambda: service, uplink=uplink or Uplink())
    async with (
        network.transport(ALICE, world=VirtualWorld(), disk=disk) as alice,
        network.transport(BOB, world=VirtualWorld(), disk=disk) as bob,
    ):
        bob.serve(BLOB_PROTOCOL, StreamServer(serving).serve)
        await alice.connect(bob.peer_id, bob.addresses())
        yield partial(alice.open_stream, bob.peer_id, BLOB_PROTOCOL), service, disk


async def ask(stream: Stream, *, push: bool, digest: bytes, size_bytes: int) -> Answer:
    await stream.send(msgspec.msgpack.encode(Ask(push, digest, size_bytes, b"lease")))
    return msgspec.msgpack.decode(await stream.receive() or b"", type=Answer)


def longest_seconds(size_bytes: int) -> float:
    return limits.STALL_SECONDS + size_bytes / limits.BYTES_PER_SECOND_MIN


async def test_a_reader_that_trickles_is_broken_off(tmp_path) -> None:
    async with asked_by_alice(tmp_path) as (open_stream, service, disk):
        reference = service.offer(disk, DATA)
        stream = await open_stream()
        began = trio.current_time()
        await ask(stream, push=False, digest=reference.digest, size_bytes=len(DATA))
        seconds_a_frame = 2 * longest_seconds(len(DATA)) * pieces.STREAM_FRAME_BYTES
        received = 0
        with pytest.raises(StreamError):
            while received < len(DATA):
                received += len(await stream.receive() or b"")
                await trio.sleep(seconds_a_frame / len(DATA))
        limit = longest_seconds(len(DATA))
        assert trio.current_time() - began == pytest.approx(limit, abs=10)
        assert service.released == 1


async def test_the_servers_own_uplink_limit_is_not_the_readers_fault(tmp_path) -> None:
    seconds = 2 * longest_seconds(len(DATA))

    async def fetch_slowly(stream: Stream, reference, sink: Sink) -> None:
        """A client with more patience than ours."""
        await ask(stream, push=False, digest=reference.digest, size_bytes=len(DATA))
        while len(sink.data) < len(DATA):
            sink.write(await stream.receive() or b"")

    async with asked_by_alice(tmp_path, Uplink(len(DATA) / seconds)) as (
        open_stream,
        service,
        disk,
    ):
        reference = service.offer(disk, DATA)
        began = trio.current_time()
        sink = Sink(len(DATA))
        await fetch_slowly(await open_stream(), reference, sink)
        assert trio.current_time() - began == pytest.approx(seconds, rel=0.05)
        assert service.released == 1


async def test_only_what_the_uplink_limit_takes_is_added_to_a_bodys_time() -> None:
    """Not the pauses of a client that trickles."""
    uplink = Uplink(1e6)
    began = trio.current_time()
    own_seconds = 0.0
    pace = Pace(1 << 20)
    with pace.scope:
        while True:
            await trio.sleep(5.0)  # the client takes nothing
            pace.moved()
            await uplink.take(500_000, pace)  # another's turn
            before = trio.current_time()
            await uplink.take(1000, pace)
            own_seconds += trio.current_time() - before
            pace.moved()
    assert own_seconds > 1
    seconds = trio.current_time() - began
    assert seconds == pytest.approx(longest_seconds(1 << 20) + own_seconds, abs=0.5)


async def test_a_turn_that_was_waited_for_in_vain_is_given_back() -> None:
    uplink = Uplink(1e6)
    pace = Pace(1 << 20)
    await uplink.take(1_000_000, pace)
    with trio.move_on_after(0.1) as scope:
        await uplink.take(5_000_000, pace)
    assert scope.cancelled_caught
    began = trio.current_time()
    await uplink.take(1, pace)
    assert trio.current_time() - began < 1.0


@pytest.mark.parametrize("push", [False, True])
async def test_who_is_evicted_is_cut_off_in_the_middle(tmp_path, push: bool) -> None:
    async with asked_by_alice(tmp_path) as (open_stream, service, disk):
        reference = service.offer(disk, DATA)
        stream = await open_stream()
        await ask(stream, push=push, digest=reference.digest, size_bytes=len(DATA))
        began = trio.current_time()
        with pytest.raises(StreamError):
            for number in range(len(DATA) // pieces.STREAM_FRAME_BYTES):
                if number == 5:
                    service.admitted.clear()
                if push:
                    await stream.send(bytes(pieces.STREAM_FRAME_BYTES))
                else:
                    await stream.receive()
                await trio.sleep(0.2)
        assert trio.current_time() - began < 5
        if push:
            assert service.sinks[-1].abandoned
        else:
            assert service.released == 1


async def test_an_admission_and_a_refusal_are_asked_for_again(tmp_path) -> None:
    async with asked_by_alice(tmp_path) as (open_stream, service, disk):
        reference = service.offer(disk, DATA)

        async def fetch() -> None:
            sink = Sink(len(DATA))
            await fetch_over_stream(await open_stream(), reference, sink, b"lease", Traffic())

        await fetch()
        for _ in range(2):
            service.admitted.clear()
            await trio.sleep(2 * limits.ADMITTED_SECONDS)
            with pytest.raises(FetchError, match="403 this peer is not admitted"):
                await fetch()
            service.admitted.add(ALICE.peer_id)
            await trio.sleep(2 * limits.ADMITTED_SECONDS)
            await fetch()


async def test_who_asks_for_nothing_is_left_in_time(tmp_path) -> None:
    async with asked_by_alice(tmp_path) as (open_stream, _service, _disk):
        stream = await open_stream()
        began = trio.current_time()
        with pytest.raises(StreamError):
            await stream.receive()
        assert trio.current_time() - began <= limits.HEAD_SECONDS + 1


@pytest.mark.parametrize(
    "first",
    [
        b"rubbish",
        msgspec.msgpack.encode(Ask(False, b"short", 1, b"")),
        msgspec.msgpack.encode(Ask(False, bytes(33), 1, b"")),
        msgspec.msgpack.encode(Ask(True, bytes(32), -1, b"")),
        msgspec.msgpack.encode(Ask(True, bytes(32), limits.BLOB_BYTES_MAX + 1, b"")),
    ],
)
async def test_a_bad_request_gets_a_status_and_is_no_defect_here(
    tmp_path, caplog, first: bytes
) -> None:
    async with asked_by_alice(tmp_path) as (open_stream, service, _disk):
        stream = await open_stream()
        await stream.send(first)
        answer = msgspec.msgpack.decode(await stream.receive() or b"", type=Answer)
        assert answer.status == 400
        assert answer.reason
        assert not service.asked
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_source_has_more_patience_than_who_fetches_a_piece() -> None:
    """Who fetches honestly is never the one that is broken off."""
    size_bytes = checkpoint_limits.PIECE_BYTES_MAX
    patience = job.PIECE_DEADLINE_SECONDS + size_bytes / job.PIECE_BYTES_PER_SECOND_MIN
    assert longest_seconds(checkpoint_limits.PIECE_BYTES_MIN) > job.PIECE_DEADLINE_SECONDS
    assert patience < longest_seconds(size_bytes) <= 2 * patience
