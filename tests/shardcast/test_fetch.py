from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from math import inf

import pytest
import trio
from msgspec.structs import replace

from swarm.errors import DeadlineError, DiskFullError
from swarm.shardcast import limits
from swarm.shardcast.fetch.job import Job
from swarm.shardcast.manifest import BadManifest, build, digest_of
from swarm.shardcast.store import CheckpointConflict
from swarm.transport import Arrived, BlobReference, FetchError, OpenBlob, Refused, Source, Transport
from swarm.transport.http.limits import CONNECT_SECONDS
from swarm.wire.identity import PeerId
from swarm.world import Piece, Sink
from tests.memory_network import MemoryNetwork
from tests.shardcast.harness import RUN, Peer, announcement, peer, peers, put_folder, same_files
from tests.shardcast.memory_disk import MemoryDisk

KIB = 1024


def some_files(megabytes: float = 2.0, seed: int = 1) -> dict[str, bytes]:
    rng = random.Random(seed)
    return {
        "config.json": b'{"model_type": "qwen2"}',
        "model.safetensors": rng.randbytes(int(megabytes * KIB * KIB)),
        "tokenizer/vocab.txt": rng.randbytes(1000),
    }


async def test_a_checkpoint_arrives_whole() -> None:
    network = MemoryNetwork(latency_seconds=0.01)
    files = some_files()
    async with peers(network, 2) as (trainer, worker):
        checkpoint = await trainer.publish(0, files)
        folder = await worker.fetcher.fetch(checkpoint, lambda: [trainer.source])
        assert same_files(worker.disk, folder, files)
        assert worker.store.complete() == [(0, 0)]
        (done,) = worker.events.named("shardcast.checkpoint_complete")
        total = checkpoint.total_bytes + checkpoint.reference.size_bytes
        assert done.fields["by_source"] == {trainer.transport.peer_id: total}
        assert await worker.fetcher.fetch(checkpoint, lambda: []) == folder


async def test_mirrors_of_a_manifest_that_is_not_trusted_are_no_sources() -> None:
    async with peers(MemoryNetwork(), 1) as (stranger,):
        await put_folder(stranger.disk, "made", some_files())
        manifest = await build(stranger.disk, "made", run=RUN, lineage=0, step=1)
        manifest = replace(manifest, mirrors=["http://192.0.2.1:80"])
        held = await stranger.store.publish("made", 0, 1, manifest=manifest)
        for plain, addresses in ((False, [("http://192.0.2.1:80",)]), (True, [])):
            job = Job(held.key, announcement(held), lambda: [], 0.0, plain=plain)
            job.found = held
            assert [source.addresses for source in job.sources()] == addresses


class _Corrupt:
    """Serves what another store serves, with other bytes of the same length."""

    def __init__(self, honest: Peer, liar: Peer) -> None:
        self.honest = honest
        liar.disk.put("junk", 0, bytes(1 << 20))
        liar.service.open = self.open  # type: ignore[method-assign]
        self.served = 0

    def open(self, client: PeerId | None, digest: bytes) -> OpenBlob:
        blob = self.honest.store.blobs.open(digest)
        assert blob is not None
        blob.release()
        self.served += 1
        return OpenBlob("junk", 0, blob.size_bytes)


async def test_a_corrupt_source_costs_one_round_and_is_named_and_avoided() -> None:
    network = MemoryNetwork(latency_seconds=0.01)
    files = some_files(8)
    async with peers(network, 3) as (trainer, liar, worker):
        checkpoint = await trainer.publish(0, files)
        corrupt = _Corrupt(trainer, liar)
        worker.fetcher.width.per_source = 1
        folder = await worker.fetcher.fetch(checkpoint, lambda: [trainer.source, liar.source])
        assert same_files(worker.disk, folder, files)
        refused = worker.events.named("shardcast.piece_refused")
        assert corrupt.served == len(refused) == 1
        assert refused[0].fields["source"] == liar.transport.peer_id
        assert refused[0].fields["reason"] == "sent wrong bytes"
        book = worker.fetcher.book
        assert book.weight(liar.transport.peer_id) < book.weight(trainer.transport.peer_id)
        # The next checkpoint, soon after, does not even ask it.
        second = await trainer.publish(1, some_files(1, seed=2))
        await worker.fetcher.fetch(second, lambda: [trainer.source, liar.source])
        assert corrupt.served == 1


class _Damaged:
    """Serves as a web server would, with some pieces wrong, missing or cut off."""

    def __init__(self, mirror: Peer, digests: Sequence[bytes]) -> None:
        self.whole, self.mirror = mirror.service.open, mirror
        mirror.disk.put("junk", 0, bytes(1 << 20))
        mirror.service.open = self.open  # type: ignore[method-assign]
        self.wrong, self.missing, self.cut = digests
        self.asked: Counter[bytes] = Counter()

    def open(self, client: PeerId | None, digest: bytes) -> OpenBlob:
        self.asked[digest] += 1
        blob = self.whole(client, digest)
        if digest == self.missing:
            raise Refused(404, "not found")
        if digest == self.wrong:
            return OpenBlob("junk", 0, blob.size_bytes)
        return OpenBlob(blob.path, blob.offset, blob.size_bytes - 100 * (digest == self.cut))


async def test_of_a_damaged_mirror_all_else_is_fetched_and_the_damage_named() -> None:
    network = MemoryNetwork(latency_seconds=0.01)
    files = some_files(4)
    async with peers(network, 2) as (trainer, worker):
        checkpoint = await trainer.publish(0, files)
        mirror = Source(addresses=tuple(trainer.transport.bulk_addresses()))
        held = trainer.store.held((0, 0))
        assert held is not None
        pieces = held.manifest.pieces
        damaged = _Damaged(trainer, [pieces[index].digest for index in (1, 3, 5)])
        began = trio.current_time()
        with pytest.raises(FetchError) as caught:
            await worker.fetcher.fetch(checkpoint, lambda: [mirror])
        assert trio.current_time() - began < 15, "it does not wait for what cannot come"
        words = str(caught.value)
        assert f"no mirror has 3 of the {len(pieces)} pieces" in words
        assert f"piece 1, of model.safetensors, blob/{pieces[1].digest.hex()}" in words
        assert "sent wrong bytes" in words
        part = worker.store.held((0, 0))
        assert part is not None
        assert [index for index, here in enumerate(part.pieces) if not here] == [1, 3, 5]
        refused = worker.events.named("shardcast.piece_refused")
        assert {event.fields["piece"] for event in refused} == {1, 3, 5}
        assert max(damaged.asked.values()) == 1
        # Mended, it gives what is missing.
        trainer.service.open = damaged.whole  # type: ignore[method-assign]
        folder = await worker.fetcher.fetch(checkpoint, lambda: [mirror])
        assert same_files(worker.disk, folder, files)


async def test_what_a_mirror_lacks_comes_from_peers_meanwhile() -> None:
    network = MemoryNetwork(latency_seconds=0.01)
    files = some_files(4)
    async with (
        peer(network, 1) as trainer,
        peer(network, 2) as web,
        peer(network, 3, have=True) as worker,
    ):
        checkpoint = await trainer.publish(0, files)
        await web.fetcher.fetch(checkpoint, lambda: [trainer.source])
        held = web.store.held((0, 0))
        assert held is not None
        _Damaged(web, [held.manifest.pieces[index].digest for index in (1, 3, 5)])
        mirror = Source(addresses=tuple(web.transport.bulk_addresses()))
        sources = [mirror]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.fetcher.fetch, checkpoint, lambda: sources)
            await trio.sleep(2)
            part = worker.store.held((0, 0))
            assert part is not None and sum(part.pieces) == len(part.pieces) - 3
            sources.append(trainer.source)
        assert same_files(worker.disk, held.folder, files)


async def test_a_fast_source_is_asked_for_several_pieces_at_once_and_believed_in_none() -> None:
    """One source sends right bytes, one wrong ones now and then, one breaks off in between."""
    network = MemoryNetwork(latency_seconds=0.001)
    files = some_files(32)
    async with peers(network, 4) as (trainer, liar, forgetful, worker):
        checkpoint = await trainer.publish(0, files)
        corrupt = _Corrupt(trainer, liar)
        lie, turns = corrupt.open, itertools.count(1)

        def sometimes_lie(client: PeerId | None, digest: bytes) -> OpenBlob:
            blob = trainer.store.blobs.open(digest)
            assert blob is not None
            if next(turns) % 5 == 0:
                blob.release()
                return lie(client, digest)
            liar.disk.put(blob.path, 0, trainer.disk.data(blob.path))
            return blob

        def sometimes_forget(client: PeerId | None, digest: bytes) -> OpenBlob:
            if next(turns) % 7 == 0:
                raise Refused(404, "unknown blob")
            blob = trainer.store.blobs.open(digest)
            assert blob is not None
            forgetful.disk.put(blob.path, 0, trainer.disk.data(blob.path))
            return blob

        liar.service.open = sometimes_lie  # type: ignore[method-assign]
        forgetful.service.open = sometimes_forget  # type: ignore[method-assign]
        transport = _Counting(worker.transport)
        worker.fetcher._requester._transport = transport
        sources = [each.source for each in (trainer, liar, forgetful)]
        await worker.fetcher.fetch(checkpoint, lambda: sources)
        assert same_files(worker.disk, "checkpoints/0-0", files)
        assert max(transport.asked) > 4
        assert len(transport.asked) < checkpoint.total_bytes // limits.PIECE_BYTES_MIN
        refused = worker.events.named("shardcast.piece_refused")
        blamed = {(event.fields["source"], event.fields["reason"]) for event in refused}
        names = {name for name, _ in blamed}
        assert names <= {liar.transport.peer_id, forgetful.transport.peer_id}
        assert (liar.transport.peer_id, "sent wrong bytes") in blamed
        # Every piece counted once, by whoever sent it right.
        pieces = [e.fields["piece"] for e in worker.events.named("shardcast.piece_received")]
        assert len(set(pieces)) == len(pieces)
        assert not trainer.store.blobs.named(checkpoint.reference.digest).readers  # type: ignore[union-attr]


class _Counting:
    """Another's transport, and how many blobs it was asked for at a time."""

    def __init__(self, transport: Transport) -> None:
        self.peer_id = transport.peer_id
        self._transport = transport
        self.asked: list[int] = []

    async def fetch(self, source: Source, reference: BlobReference, sink: Sink) -> Piece:
        self.asked.append(1)
        return await self._transport.fetch(source, reference, sink)

    async def fetch_run(
        self, source: Source, wanted: Sequence[tuple[BlobReference, Sink]], arrived: Arrived
    ) -> None:
        self.asked.append(len(wanted))
        await self._transport.fetch_run(source, wanted, arrived)

    def round_trip_seconds(self, source: Source) -> float:
        return self._transport.round_trip_seconds(source)


async def test_a_relay_serves_pieces_before_it_has_them_all() -> None:
    """Trainer → relay → client, where the relay can never complete: the pieces flow through."""
    network = MemoryNetwork(latency_seconds=0.01)
    files = some_files()
    async with (
        peer(network, 1) as trainer,
        peer(network, 2, have=True) as relay,
        peer(network, 3, have=True) as client,
    ):
        checkpoint = await trainer.publish(0, files)
        withheld = trainer.store.held((0, 0)).manifest.pieces[5].digest  # type: ignore[union-attr]
        open_blob = trainer.service.open
        never = trio.Event()

        def open_most(peer: PeerId | None, digest: bytes) -> OpenBlob:
            if digest == withheld and not never.is_set():
                return trainer.service.open(peer, b"unknown")
            return open_blob(peer, digest)

        trainer.service.open = open_most  # type: ignore[assignment, method-assign]
        await client.connect(relay)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relay.fetcher.fetch, checkpoint, lambda: [trainer.source])
            nursery.start_soon(client.fetcher.fetch, checkpoint, lambda: [relay.source])
            await trio.sleep(5)
            for one in (relay, client):
                held = one.store.held((0, 0))
                assert held is not None and not held.complete
                assert held.missing() == [5]
            never.set()
        for one in (relay, client):
            assert same_files(one.disk, "checkpoints/0-0", files)


class _SlowDisk:
    """A liar's disk, from which nothing comes, or a little at a time."""

    def __init__(self, disk: MemoryDisk, pause_seconds: float) -> None:
        self._read = disk.read
        self._pause_seconds = pause_seconds
        disk.read = self.read  # type: ignore[method-assign]

    async def read(self, path: str, offset: int = 0, size_bytes: int | None = None) -> bytes:
        if offset % (256 * KIB):
            await trio.sleep(self._pause_seconds)
        return await self._read(path, offset, size_bytes)


@pytest.mark.parametrize(
    "kind, event, reason",
    [
        ("sends wrong bytes", "piece_refused", "sent wrong bytes"),
        ("stops in the middle", "source_passed_over", "was overtaken by another source after"),
        ("trickles", "source_passed_over", "was overtaken by another source after"),
        ("claims what it lacks", "piece_refused", "unknown blob"),
        ("has an older checkpoint only", "source_passed_over", "unknown blob"),
    ],
)
async def test_whoever_does_not_deliver_is_named_and_avoided(
    kind: str, event: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A piece comes in several parts, so that a source can stop between them.
    monkeypatch.setattr("simnet.bulk.INLINE_BYTES_MAX", 64 * 1024)
    network = MemoryNetwork(latency_seconds=0.01)
    claims = kind.startswith("claims")
    async with (
        peer(network, 1, have=claims) as trainer,
        peer(network, 2, have=claims) as liar,
        peer(network, 3, have=claims) as worker,
    ):
        old = await trainer.publish(0, some_files(4))
        files = some_files(40, seed=2)
        checkpoint = await trainer.publish(1, files)
        has = old if kind.startswith("has") else checkpoint
        await liar.fetcher.fetch(has, lambda: [trainer.source])
        if kind.startswith("sends"):
            _Corrupt(trainer, liar)
        elif kind.startswith("stops"):
            _SlowDisk(liar.disk, inf)
        elif kind.startswith("trickles"):
            _SlowDisk(liar.disk, 5.0)
        serve = liar.service.open
        asked = []

        def counted(client: PeerId | None, digest: bytes) -> OpenBlob:
            asked.append(digest)
            return serve(client, b"unknown" if claims else digest)

        liar.service.open = counted  # type: ignore[method-assign]
        if claims:
            await worker.connect(liar, trainer)
            await trio.sleep(1)
        sources = [liar.source, trainer.source]
        with trio.fail_after(30):
            folder = await worker.fetcher.fetch(checkpoint, lambda: sources)
        assert same_files(worker.disk, folder, files)
        named = [
            each
            for name in ("shardcast.piece_refused", "shardcast.source_passed_over")
            for each in worker.events.named(name)
        ]
        assert {each.fields["source"] for each in named} == {liar.transport.peer_id}
        assert any(
            each.name == f"shardcast.{event}" and reason in each.fields["reason"] for each in named
        )
        assert asked and len(asked) <= 20, "of 163 requests at least"
        asked.clear()
        files = some_files(40, seed=3)
        checkpoint = await trainer.publish(2, files)
        if claims:
            await trio.sleep(1)
        with trio.fail_after(30):
            folder = await worker.fetcher.fetch(checkpoint, lambda: sources)
        assert same_files(worker.disk, folder, files)
        assert len(asked) <= 20


async def test_many_stalled_sources_cannot_hold_every_slot() -> None:
    network = MemoryNetwork(latency_seconds=0.01)
    files = some_files(8)
    async with peers(network, 7) as (trainer, worker, *stuck):
        checkpoint = await trainer.publish(0, files)
        for one in stuck:
            await one.fetcher.fetch(checkpoint, lambda: [trainer.source])
            network.cut(one.transport.peer_id, worker.transport.peer_id)
        sources = [one.source for one in (*stuck, trainer)]
        with trio.fail_after(5):
            folder = await worker.fetcher.fetch(checkpoint, lambda: sources)
        assert same_files(worker.disk, folder, files)


async def test_sources_may_appear_and_vanish_while_fetching() -> None:
    network = MemoryNetwork(latency_seconds=0.05)
    files = some_files(8)
    current: list[Source] = []
    async with peer(network, 1) as trainer, peer(network, 3) as worker:
        checkpoint = await trainer.publish(0, files)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.fetcher.fetch, checkpoint, lambda: current)
            await trio.sleep(3)
            async with peer(network, 2) as relay:
                await relay.fetcher.fetch(checkpoint, lambda: [trainer.source])
                current.append(relay.source)
                some_here = trio.Event()
                worker.store.watch(lambda change, held, index: some_here.set())
                with trio.fail_after(2 * limits.SOURCES_RECHECK_SECONDS):
                    await some_here.wait()
                await trio.sleep(0.2)
            held = worker.store.held((0, 0))
            assert held is not None
            assert 0 < len(held.missing()) < len(held.pieces)
            current.append(trainer.source)
        assert same_files(worker.disk, "checkpoints/0-0", files)


async def test_an_interrupted_fetch_goes_on_where_it_was() -> None:
    network = MemoryNetwork(latency_seconds=0.05)
    files = some_files(8)
    disk = MemoryDisk()
    async with peer(network, 1) as trainer:
        checkpoint = await trainer.publish(0, files)
        async with peer(network, 2, disk=disk) as worker:
            with trio.move_on_after(0.6):
                await worker.fetcher.fetch(checkpoint, lambda: [trainer.source])
            first = worker.events.named("shardcast.piece_received")
            assert 5 < len(first) < 34
        async with peer(network, 2, disk=disk) as worker:
            folder = await worker.fetcher.fetch(checkpoint, lambda: [trainer.source])
            second = worker.events.named("shardcast.piece_received")
            assert same_files(disk, folder, files)
            pieces = [event.fields["piece"] for event in first + second]
            assert sorted(pieces) == list(range(-1, 34))


async def test_what_did_not_change_is_not_fetched_again() -> None:
    network = MemoryNetwork()
    files = some_files()
    async with peers(network, 2) as (trainer, worker):
        first = await trainer.publish(0, files)
        await worker.fetcher.fetch(first, lambda: [trainer.source])
        files["config.json"] = b"{}"
        second = await trainer.publish(1, files)
        folder = await worker.fetcher.fetch(second, lambda: [trainer.source])
        assert same_files(worker.disk, folder, files)
        done = worker.events.named("shardcast.checkpoint_complete")[1]
        assert done.fields["bytes_fetched"] == second.reference.size_bytes + 2


async def test_adapters_carry_no_tokenizer_that_their_base_carries() -> None:
    """A newcomer fetches it once, with the first adapter, and never again."""
    network = MemoryNetwork()
    same = {"config.json": b"{}" * 50, "tokenizer.json": random.Random(0).randbytes(3_500_000)}
    bytes_of_adapter = 2_000_000
    async with peers(network, 2) as (trainer, worker):
        weights = random.Random(1).randbytes(5_000_000)
        base = await trainer.publish(0, {"model.safetensors": weights, **same})
        fetched = []
        for step in range(1, 4):
            changed = random.Random(1 + step).randbytes(bytes_of_adapter)
            made = {"adapter_model.safetensors": changed, **same}
            checkpoint = await trainer.publish(step, made)
            for each in (checkpoint, *([base] if step == 1 else [])):
                folder = await worker.fetcher.fetch(each, lambda: [trainer.source])
                done = worker.events.named("shardcast.checkpoint_complete")[-1]
                manifest = each.reference.size_bytes
                fetched.append(done.fields["bytes_fetched"] - manifest)
            assert step == 1 or same_files(worker.disk, folder, made)
        unchanged = sum(map(len, same.values()))
        first, whole, *later = fetched
        assert first + whole == bytes_of_adapter + len(weights) + unchanged
        assert later == [bytes_of_adapter] * 2


async def test_a_deadline_names_the_sources_and_their_reasons() -> None:
    network = MemoryNetwork()
    async with peers(network, 2) as (trainer, worker):
        checkpoint = await trainer.publish(0, some_files())
        with pytest.raises(DeadlineError, match=r"0/0 was not fetched within 3 s \(no source"):
            await worker.fetcher.fetch(checkpoint, lambda: [], deadline_seconds=3)
        trainer.service._admits = lambda peer, credential: False
        with pytest.raises(
            DeadlineError, match=f"{trainer.transport.peer_id}: .*403 this peer is not admitted"
        ):
            await worker.fetcher.fetch(checkpoint, lambda: [trainer.source], deadline_seconds=3)


async def test_a_full_disk_is_one_sentence() -> None:
    network = MemoryNetwork()
    async with (
        peer(network, 1) as trainer,
        peer(network, 2, disk=MemoryDisk(capacity=1 << 20)) as worker,
    ):
        checkpoint = await trainer.publish(0, some_files())
        with pytest.raises(DiskFullError, match=r"needs 2\.1 MB but only 1\.0 MB are free"):
            await worker.fetcher.fetch(checkpoint, lambda: [trainer.source])
        assert worker.disk.list("checkpoints") == []
        worker.disk.capacity_bytes = 1 << 30
        await worker.fetcher.fetch(checkpoint, lambda: [trainer.source])


async def test_a_disk_that_fills_up_while_pieces_land() -> None:
    network = MemoryNetwork()
    async with peers(network, 2) as (trainer, worker):
        checkpoint = await trainer.publish(0, some_files())

        def fills_up(operation: str) -> None:
            if operation == "commit" and worker.disk.steps > 8:
                raise DiskFullError("the disk is full; free some space")

        worker.disk.before = fills_up
        with pytest.raises(DiskFullError, match="free some space"):
            await worker.fetcher.fetch(checkpoint, lambda: [trainer.source])


async def test_without_room_for_a_spare_file_a_stuck_source_costs_time_only() -> None:
    network = MemoryNetwork(latency_seconds=0.01)
    size = limits.PIECE_BYTES_MIN
    files = {"model.safetensors": random.Random(1).randbytes(8 * size)}
    async with peers(network, 2) as (trainer, stuck):
        checkpoint = await trainer.publish(0, files)
        await stuck.fetcher.fetch(checkpoint, lambda: [trainer.source])
        needed = checkpoint.reference.size_bytes + 8 * size
        async with peer(network, 3, disk=MemoryDisk(needed + size // 2)) as worker:
            network.cut(stuck.transport.peer_id, worker.transport.peer_id)
            allocations = 0

            def count(operation: str) -> None:
                nonlocal allocations
                allocations += operation == "allocate"
                assert allocations < 100, "all stuck pieces are tried now and then"

            worker.disk.before = count
            started = trio.current_time()
            folder = await worker.fetcher.fetch(checkpoint, lambda: [stuck.source, trainer.source])
            seconds = trio.current_time() - started
            assert same_files(worker.disk, folder, files)
            assert CONNECT_SECONDS < seconds < 60
            assert allocations > 3, "there was none for a spare file"


class _SlowlyForgetting(MemoryDisk):
    """Deleting a file takes longer than the patience with one of the last pieces."""

    async def remove(self, path: str) -> None:
        await trio.sleep(3.0)
        await super().remove(path)


async def test_a_piece_that_is_here_is_asked_of_nobody_else() -> None:
    """Though the request that brought it lasts until its spare file is deleted."""
    network = MemoryNetwork(latency_seconds=0.01)
    files = {"model.safetensors": random.Random(1).randbytes(limits.PIECE_BYTES_MIN)}
    async with (
        peer(network, 1) as trainer,
        peer(network, 2) as other,
        peer(network, 3) as stuck,
        peer(network, 4, disk=_SlowlyForgetting()) as worker,
    ):
        checkpoint = await trainer.publish(0, files)
        for each in (other, stuck):
            await each.fetcher.fetch(checkpoint, lambda: [trainer.source])
        network.cut(stuck.transport.peer_id, worker.transport.peer_id)
        worker.fetcher.book.succeeded(stuck.transport.peer_id, 1 << 40, 1.0)
        started = trio.current_time()
        folder = await worker.fetcher.fetch(
            checkpoint, lambda: [stuck.source, trainer.source, other.source]
        )
        assert same_files(worker.disk, folder, files)
        assert any(
            event.fields["source"] == stuck.transport.peer_id
            for event in worker.events.named("shardcast.source_passed_over")
        ), "the piece was asked of the stuck source first"
        assert trio.current_time() - started < 10


async def test_a_signed_but_senseless_manifest_is_refused() -> None:
    network = MemoryNetwork()
    async with peers(network, 2) as (trainer, worker):
        blob = b"\x93not a manifest"
        await trainer.disk.write("blob", blob)
        trainer.service.register(digest_of(blob), "blob", 0, len(blob))
        checkpoint = await trainer.publish(0, {"a": b"b"})
        right = checkpoint.reference
        reference = replace(right, step=9, digest=digest_of(blob), size_bytes=len(blob))
        for announced, total, words in (
            (reference, 1, "cannot be decoded"),
            (replace(right, step=9), 1, "0/9 is one of owner/run 0/0"),
            (right, 2, "with 2 bytes, and its manifest lists 1"),
        ):
            wrong = replace(checkpoint, reference=announced, total_bytes=total)
            with pytest.raises(BadManifest, match=words):
                await worker.fetcher.fetch(wrong, lambda: [trainer.source])
            assert worker.disk.list("checkpoints") == []


async def test_a_second_manifest_for_the_same_step_is_a_conflict() -> None:
    network = MemoryNetwork()
    async with peers(network, 3) as (trainer, other, worker):
        first = await trainer.publish(0, some_files(seed=1))
        second = await other.publish(0, some_files(seed=2))
        await worker.fetcher.fetch(first, lambda: [trainer.source])
        with pytest.raises(CheckpointConflict, match="0/0 is already on disk"):
            await worker.fetcher.fetch(second, lambda: [other.source])


async def test_two_fetches_meet_a_partial_checkpoint_of_another_manifest() -> None:
    """The first discards it, which takes a while; the second waits for the first."""
    network = MemoryNetwork(latency_seconds=0.05)
    files = some_files(seed=2)
    async with peers(network, 3) as (former, trainer, worker):
        withdrawn = await former.publish(0, some_files(seed=1))
        checkpoint = await trainer.publish(0, files)
        with trio.move_on_after(0.3):
            await worker.fetcher.fetch(withdrawn, lambda: [former.source])
        held = worker.store.held((0, 0))
        assert held is not None and not held.complete
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(worker.fetcher.fetch, checkpoint, lambda: [trainer.source])
        assert same_files(worker.disk, "checkpoints/0-0", files)
        assert len(worker.events.named("shardcast.checkpoint_removed")) == 1


async def test_a_peer_is_late_while_any_of_its_fetches_is() -> None:
    network = MemoryNetwork(latency_seconds=0.1)
    async with peers(network, 3, have=True) as (stuck, trainer, worker):
        have = worker.have
        assert have is not None
        await worker.connect(stuck, trainer)
        large = await stuck.publish(0, some_files(40))
        small = await trainer.publish(1, some_files(1))
        await trio.sleep(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.fetcher.fetch, large, lambda: [stuck.source])
            await trio.sleep(1.2)
            held = worker.store.held((0, 0))
            assert held is not None and len(held.missing()) > 8
            assert have.late, "its neighbour has everything"
            network.cut(stuck.transport.peer_id, worker.transport.peer_id)
            await worker.fetcher.fetch(small, lambda: [trainer.source])
            assert have.late, "the other fetch still is"
            network.sever(stuck.transport.peer_id, worker.transport.peer_id)
            await trio.sleep(2)
            assert have.claims.of(stuck.transport.peer_id, large.reference.digest) is None
            assert not have.late, "nobody is known to have more"
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(6))
async def test_a_swarm_of_liars_and_losses_delivers_right_bytes_to_all(seed: int) -> None:
    """Random faults until they heal: then everybody is complete, and every stored byte is right."""
    rng = random.Random(seed)
    network = MemoryNetwork(latency_seconds=0.02)
    files = some_files(3, seed=seed)
    async with peers(network, 8, have=True) as everyone:
        trainer, liar, honest = everyone[0], everyone[1], everyone[2:]
        checkpoint = await trainer.publish(0, files)
        _Corrupt(trainer, liar)
        for one in honest:
            await one.connect(*rng.sample([p for p in everyone if p is not one], 4))
        sources = [one.source for one in everyone]
        async with trio.open_nursery() as fetching:
            for one in honest:
                fetching.start_soon(one.fetcher.fetch, checkpoint, lambda: sources)
            broken = []
            for _ in range(12):
                pair = [one.transport.peer_id for one in rng.sample(everyone, 2)]
                rng.choice([network.sever, network.cut])(*pair)
                broken.append(pair)
                await trio.sleep(rng.random() * 0.1)
            await trio.sleep(5)
            for pair in broken:
                network.heal(*pair)
        for one in honest:
            assert same_files(one.disk, "checkpoints/0-0", files)
            blamed = {
                event.fields["source"]
                for event in one.events.named("shardcast.piece_refused")
                if event.fields["reason"] == "sent wrong bytes"
            }
            assert blamed <= {liar.transport.peer_id}


async def test_a_liar_asked_beside_an_honest_source_cannot_write_over_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both send in small reads; the liar's come between the honest ones and after them."""
    monkeypatch.setattr("simnet.bulk.INLINE_BYTES_MAX", 16 * KIB)
    network = MemoryNetwork(latency_seconds=0.05)
    files = {"model.safetensors": random.Random(0).randbytes(256 * KIB)}
    async with peers(network, 3) as (trainer, liar, worker):
        checkpoint = await trainer.publish(0, files)
        corrupt = _Corrupt(trainer, liar)
        for each in (trainer, liar):
            each.transport.uplink.bytes_per_second = 100e3  # type: ignore[attr-defined]
        current = [trainer.source]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.fetcher.fetch, checkpoint, lambda: current)
            await trio.sleep(0.3)  # the manifest is here, the piece is under way
            current.append(liar.source)
        assert corrupt.served == 1
        assert same_files(worker.disk, "checkpoints/0-0", files)
        assert worker.events.named("shardcast.pieces_lost") == []
        assert worker.disk.list("checkpoints") == ["0-0"]
        (done,) = worker.events.named("shardcast.checkpoint_complete")
        assert list(done.fields["by_source"]) == [trainer.transport.peer_id]


async def test_a_faster_source_wins_over_a_stuck_one_in_place() -> None:
    network = MemoryNetwork(latency_seconds=0.01)
    files = some_files(1)
    async with peers(network, 3) as (trainer, stuck, worker):
        checkpoint = await trainer.publish(0, files)
        await stuck.fetcher.fetch(checkpoint, lambda: [trainer.source])
        network.cut(stuck.transport.peer_id, worker.transport.peer_id)
        current = [stuck.source]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.fetcher.fetch, checkpoint, lambda: current)
            await trio.sleep(2)
            current.append(trainer.source)
            with trio.fail_after(3):
                await worker.fetcher.fetch(checkpoint, lambda: current)
        assert same_files(worker.disk, "checkpoints/0-0", files)
        book = worker.fetcher.book
        assert book.bandwidth(stuck.transport.peer_id) < book.bandwidth(trainer.transport.peer_id)
