"""How much is sent at once, and that each piece leaves its publisher before any leaves it twice."""

from __future__ import annotations

import random

import pytest
import trio

from swarm.shardcast import limits, store
from swarm.shardcast import uploads as uploads_module
from swarm.shardcast.have.streams import HaveExchange
from swarm.transport import Refused
from tests.memory_network import MemoryNetwork
from tests.shardcast.harness import peer, peers

SIZE = limits.PIECE_BYTES_MIN
LONG_SECONDS = uploads_module.UPLOAD_SECONDS / uploads_module.START_SHARE
"""After this long in use an uplink takes on all that it may."""


def files(pieces: int) -> dict[str, bytes]:
    return {"model.safetensors": random.Random(3).randbytes(pieces * SIZE)}


async def test_no_more_is_begun_than_the_uplink_carries_in_a_while() -> None:
    async with peer(MemoryNetwork(), 1) as one:
        await one.publish(0, files(6))
        held = one.store.held((0, 0))
        assert held is not None and one.service.uploads is not None
        uploads = one.service.uploads
        uploads.bytes_per_second = 2.5 * SIZE / uploads_module.UPLOAD_SECONDS
        pieces = [piece.digest for piece in held.manifest.pieces]
        first = one.service.open(None, pieces[5])
        with pytest.raises(Refused, match="busy"):
            one.service.open(None, pieces[0])  # so that the first one arrives sooner
        await trio.sleep(uploads_module.COUNTED_TIMES * SIZE / uploads.bytes_per_second)
        second = one.service.open(None, pieces[4])  # and its reader does not keep others out
        await trio.sleep(LONG_SECONDS)
        blobs = [one.service.open(None, digest) for digest in pieces[:3]]
        with pytest.raises(Refused, match="busy") as refused:
            one.service.open(None, pieces[3])
        assert refused.value.status == 503
        with pytest.raises(Refused, match="unknown blob"):
            one.service.open(None, b"x" * 32)
        for blob in blobs:
            blob.release()
        one.service.open(None, pieces[3]).release()
        first.release()
        second.release()
        assert held.readers == 0
        await trio.sleep(uploads_module.UPLOAD_SECONDS)  # of rest: it begins anew
        one.service.open(None, pieces[0])
        with pytest.raises(Refused, match="busy"):
            one.service.open(None, pieces[1])


async def test_slow_readers_do_not_keep_others_out() -> None:
    async with peer(MemoryNetwork(), 1) as one:
        await one.publish(0, files(8))
        held = one.store.held((0, 0))
        assert held is not None and one.service.uploads is not None
        one.service.uploads.bytes_per_second = 2.5 * SIZE / uploads_module.UPLOAD_SECONDS
        pieces = [piece.digest for piece in held.manifest.pieces]
        first = one.service.open(None, pieces[7])
        await trio.sleep(LONG_SECONDS)
        slow = [one.service.open(None, digest) for digest in pieces[:2]]
        await trio.sleep(uploads_module.COUNTED_TIMES * uploads_module.UPLOAD_SECONDS - 1)
        slow.append(one.service.open(None, pieces[2]))
        with pytest.raises(Refused, match="busy"):
            one.service.open(None, pieces[3])
        await trio.sleep(1)
        blobs = [one.service.open(None, digest) for digest in pieces[3:5]]
        with pytest.raises(Refused, match="busy"):
            one.service.open(None, pieces[5])
        # Those that counted no longer make no room when they end, those that count do.
        for blob in slow[:2]:
            blob.release()
        with pytest.raises(Refused, match="busy"):
            one.service.open(None, pieces[5])
        for blob in [slow[2], *blobs]:
            blob.release()
        blobs = [one.service.open(None, digest) for digest in pieces[:3]]
        with pytest.raises(Refused, match="busy"):
            one.service.open(None, pieces[3])
        for blob in [first, *blobs]:
            blob.release()
        assert held.readers == 0


async def test_a_busy_source_is_not_blamed_and_the_fetch_goes_on() -> None:
    network = MemoryNetwork(latency_seconds=0.05)
    async with peers(network, 2) as (trainer, worker):
        checkpoint = await trainer.publish(0, files(20))
        assert trainer.service.uploads is not None
        trainer.service.uploads.bytes_per_second = 0.5 * SIZE / uploads_module.UPLOAD_SECONDS
        await worker.fetcher.fetch(checkpoint, lambda: [trainer.source])
        assert worker.store.complete() == [(0, 0)]
        assert worker.events.named("shardcast.piece_refused") == []
        assert worker.fetcher.book.success_rate(trainer.transport.peer_id) == 1.0


async def test_a_publisher_sends_nothing_twice_before_all_has_left_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "SEEDING_BYTES_MIN", 1)
    network = MemoryNetwork(latency_seconds=0.02)
    async with peers(network, 4, have=True) as (trainer, first, second, third):
        others = [first, second, third]
        await first.connect(trainer, second, third)
        await second.connect(trainer, third)
        await third.connect(trainer)
        sent: list[bytes] = []
        serve = trainer.service.open

        def watched(client, digest):  # type: ignore[no-untyped-def]
            blob = serve(client, digest)
            sent.append(digest)
            return blob

        trainer.service.open = watched  # type: ignore[method-assign]
        checkpoint = await trainer.publish(0, files(130))
        held = trainer.store.held((0, 0))
        assert held is not None and held.unsent.bit_count() == 130
        async with trio.open_nursery() as nursery:
            for one in others:
                sources = [p.source for p in [trainer, *others] if p is not one]
                nursery.start_soon(one.fetcher.fetch, checkpoint, lambda s=sources: s)
        sent = [digest for digest in sent if digest != checkpoint.reference.digest]
        # All but the last 1/64.
        assert len(set(sent[:128])) == 128
        assert held.unsent == 0
        assert isinstance(first.have, HaveExchange)
        claim = first.have.claims.of(trainer.transport.peer_id, checkpoint.reference.digest)
        assert claim is not None and claim.complete


async def test_a_publisher_of_whom_nobody_asks_the_rest_sends_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "SEEDING_BYTES_MIN", 1)
    async with peer(MemoryNetwork(), 1) as one:
        await one.publish(0, files(3))
        held = one.store.held((0, 0))
        assert held is not None
        digest = held.manifest.pieces[1].digest
        one.service.open(None, digest).release()
        with pytest.raises(Refused, match="other pieces leave first"):
            one.service.open(None, digest)
        await trio.sleep(uploads_module.SEEDING_SECONDS)
        one.service.open(None, digest).release()
        assert held.unsent == 0 and not one.store.is_seeding
