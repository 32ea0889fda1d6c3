"""The rules that shape a broadcast's tree: whom a fetch asks, for what, and how much at once.

The worker is real; its sources are real peers that hold everything and say, over the real protocol,
what a test has them say.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import msgspec
import pytest
import trio

from swarm.shardcast import limits
from swarm.shardcast import sources as sources_module
from swarm.shardcast.fetch import choosing
from swarm.shardcast.have.claims import PROTOCOL
from swarm.transport import Arrived, BlobReference, Source, Transport
from swarm.wire.identity import PeerId
from swarm.wire.messages import Checkpoint
from swarm.world import Piece, Sink
from tests.memory_network import MemoryNetwork
from tests.shardcast.harness import Peer, peer

SIZE = sources_module.SOURCE_MEASURED_BYTES_MIN
T = TypeVar("T")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as still says something of bandwidth, and asked for one by one."""
    monkeypatch.setattr(limits, "PIECE_BYTES_MIN", SIZE)
    monkeypatch.setattr(choosing, "REQUEST_PIECES_MAX", 1)


def files(pieces: int) -> dict[str, bytes]:
    return {"model.safetensors": random.Random(5).randbytes(pieces * SIZE)}


class Watching:
    """The worker's transport: notes what is asked of whom, and holds up what comes from some."""

    def __init__(self, transport: Transport) -> None:
        self.peer_id = transport.peer_id
        self._transport = transport
        self.asked: list[tuple[PeerId | None, bytes]] = []
        """Whom, and for what."""
        self.slow: dict[PeerId | None, float] = {}
        """Seconds more that a source takes."""
        self.active = 0
        self.most = 0
        """Asked for at once."""

    async def fetch(self, source: Source, reference: BlobReference, sink: Sink) -> Piece:
        self.asked.append((source.peer, reference.digest))
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            await trio.sleep(self.slow.get(source.peer, 0.0))
            return await self._transport.fetch(source, reference, sink)
        finally:
            self.active -= 1

    async def fetch_run(
        self, source: Source, wanted: Sequence[tuple[BlobReference, Sink]], arrived: Arrived
    ) -> None:
        raise AssertionError("pieces are asked for one by one")

    def round_trip_seconds(self, source: Source) -> float:
        return 0.0  # so that a width is not more than usual for the way there


class Scene:
    """A worker and sources that all hold one checkpoint."""

    def __init__(self, worker: Peer, sources: list[Peer], checkpoint: Checkpoint) -> None:
        self.worker = worker
        self.sources = sources
        self.watching = Watching(worker.transport)
        worker.fetcher._requester._transport = self.watching  # type: ignore[assignment]
        self._checkpoint = checkpoint

    async def says(self, source: Peer, pieces: int) -> None:
        """A source tells the worker that it has these pieces (bit i is piece i)."""
        bitmap = pieces.to_bytes((pieces.bit_length() + 7) // 8, "little")
        await self._send(source, ["bitmap", self._checkpoint.reference.digest, bitmap])

    async def says_all(self, source: Peer) -> None:
        await self._send(source, ["complete", self._checkpoint.reference.digest])

    async def _send(self, source: Peer, entry: list[object]) -> None:
        await source.connect(self.worker)
        stream = await source.transport.open_stream(self.worker.transport.peer_id, PROTOCOL)
        await stream.send(msgspec.msgpack.encode([entry]))
        await trio.sleep(1)

    async def fetch(self) -> None:
        with trio.fail_after(600):
            await self.worker.fetcher.fetch(
                self._checkpoint, lambda: [source.source for source in self.sources]
            )

    def order(self) -> list[int]:
        """Pieces, as they were asked for."""
        held = self.worker.store.held((0, 0))
        assert held is not None
        number = {piece.digest: index for index, piece in enumerate(held.manifest.pieces)}
        return [number[digest] for _, digest in self.watching.asked if digest in number]

    def asked(self) -> list[int]:
        """Sources, as they were asked for pieces."""
        number = {source.transport.peer_id: index for index, source in enumerate(self.sources)}
        return [
            number[name]
            for name, digest in self.watching.asked
            if name is not None and digest != self._checkpoint.reference.digest
        ]


@asynccontextmanager
async def scene(sources: int, pieces: int, *, have: bool = True) -> AsyncIterator[Scene]:
    network = MemoryNetwork(latency_seconds=0.05)
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(peer(network, 1, have=have))
        there = [await stack.enter_async_context(peer(network, 2))]
        checkpoint = await there[0].publish(0, files(pieces))
        for number in range(1, sources):  # on one disk: they all hold the same
            source = peer(network, 2 + number, disk=there[0].disk)
            there.append(await stack.enter_async_context(source))
        yield Scene(worker, there, checkpoint)


def one_lane(here: Scene) -> None:
    here.worker.fetcher.width.usual = here.worker.fetcher.width.most = 1


async def test_the_rarest_pieces_are_fetched_first() -> None:
    """One source has all; of its neighbours three lack eight pieces, and one lacks four more."""
    rare = sum(1 << index for index in range(5, 64, 8))
    less_rare = sum(1 << index for index in range(2, 64, 16))
    every = (1 << 64) - 1

    async with scene(4, 64) as here:
        for neighbour, lacks in zip(here.sources[1:], [rare | less_rare, rare, rare], strict=True):
            await here.says(neighbour, every ^ lacks)
        await here.says(here.sources[0], every)
        del here.sources[1:]  # the neighbours only talk
        one_lane(here)
        await here.fetch()
        order = here.order()

    assert sorted(order[:8]) == list(range(5, 64, 8))
    assert order[:8] != sorted(order[:8]), "among the equally rare ones by chance"
    assert sorted(order[8:12]) == list(range(2, 64, 16))


@pytest.mark.parametrize("kind", ["even", "late", "newcomer"])
async def test_who_is_late_asks_for_more_at_once(kind: str) -> None:
    """Twelve neighbours claim a twelfth each, all but one piece, or half. Usual are four at once.
    Beside those with half, the worker is a newcomer; one of them claims everything, two nothing."""

    async with scene(12, 96) as here:
        for number, source in enumerate(here.sources):
            part = sum(1 << index for index in range(number, 96, 12))
            if kind == "late":
                part = (1 << 96) - 1 ^ (1 << number)
            if kind == "newcomer":
                half = sum(1 << index for index in range(0, 96, 2))
                part = {0: (1 << 96) - 1, 1: 0, 2: 0}.get(number, half)
            await here.says(source, part)
        here.worker.fetcher.width.usual = 4
        here.worker.fetcher.width.most = 24
        here.watching.slow = {source.transport.peer_id: 0.3 for source in here.sources}
        # Not to its end, when more are asked for in any case.
        with trio.move_on_after(limits.SOURCES_RECHECK_SECONDS + 0.7):
            await here.fetch()
        held = here.worker.store.held((0, 0))
        assert held is not None
        most, missing = here.watching.most, len(held.missing())

    assert missing
    assert most >= 24 if kind == "late" else 4 <= most <= 8, most


async def test_a_lane_stays_with_its_source_and_leaves_it_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choosing, "LEAVE_SHARE", 1 / 4)

    async with scene(2, 160) as here:
        one_lane(here)
        for source in here.sources:
            await here.says_all(source)
        await here.fetch()
        asked = here.asked()

    assert len(asked) == 160
    switched = sum(one != other for one, other in itertools.pairwise(asked))
    # After every fourth piece a source is drawn, which half of the time is the same.
    assert 6 <= switched <= 40


async def test_a_lane_leaves_a_source_that_has_become_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "LEAVE_SHARE", 0.0)

    async with scene(2, 160) as here:
        slow = here.sources[1].transport.peer_id
        here.worker.fetcher.width.usual = here.worker.fetcher.width.most = 2
        for source in here.sources:
            await here.says_all(source)
            # Both were as fast so far.
            here.worker.fetcher.book.succeeded(source.transport.peer_id, SIZE, 0.2)
        here.watching.slow = {slow: 0.6}
        await here.fetch()
        asked = here.asked()

    assert len(asked) == 160
    assert 1 <= asked.count(1) <= 10, "a lane that stays gets about 20 there"


@pytest.mark.parametrize("bytes_per_second", [2e6, 100e6])
async def test_the_uplink_is_measured(
    bytes_per_second: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From pieces that leave one after the other, whatever was believed of it before."""
    size = 1 << 18 if bytes_per_second < 10e6 else 1 << 22
    monkeypatch.setattr(limits, "PIECE_BYTES_MIN", size)

    async with peer(MemoryNetwork(), 1) as one:
        await one.publish(0, {"model.safetensors": bytes(size)})
        held = one.store.held((0, 0))
        uploads = one.service.uploads
        assert held is not None and uploads is not None
        digest = held.manifest.pieces[0].digest
        blob = one.service.open(None, digest)
        while trio.current_time() < 100:
            await trio.sleep(size / bytes_per_second)
            one.transport.traffic.sent += size
            following = one.service.open(None, digest)
            blob.release()
            blob = following
        measured = uploads.bytes_per_second

    assert limits.SOURCE_BANDWIDTH_INITIAL == 12.5e6
    assert measured == pytest.approx(bytes_per_second, rel=0.05)
