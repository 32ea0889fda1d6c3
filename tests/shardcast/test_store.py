from __future__ import annotations

import random

import msgspec
import pytest
import trio
import trio.testing

from swarm.errors import DiskFullError
from swarm.events import Events
from swarm.shardcast import limits
from swarm.shardcast import store as store_module
from swarm.shardcast.held import Change, Held, Key
from swarm.shardcast.manifest import (
    BASE_NAME,
    BadManifest,
    CheckpointManifest,
    build,
    check,
    digest_of,
)
from swarm.shardcast.store import CheckpointConflict, CheckpointStore
from tests.shardcast.harness import RUN, Recorder, put_folder, same_files
from tests.shardcast.memory_disk import MemoryDisk, PowerCut
from tests.worlds import VirtualWorld

SIZE = limits.PIECE_BYTES_MIN


def files_of(seed: int, pieces: int = 2) -> dict[str, bytes]:
    rng = random.Random(seed)
    return {"config.json": b"{%d}" % seed, "model.safetensors": rng.randbytes(pieces * SIZE - 9)}


async def opened(disk: MemoryDisk, keep: int = 5) -> CheckpointStore:
    world = VirtualWorld()
    events = Events(world, "me")
    store = CheckpointStore(disk, RUN, events, keep=keep)
    store.recorder = Recorder(events)  # type: ignore[attr-defined]
    await store.recover()
    return store


async def published(step: int, files: dict[str, bytes]) -> tuple[MemoryDisk, Held]:
    """A trainer's disk with one checkpoint."""
    disk = MemoryDisk()
    await put_folder(disk, "made", files)
    held = await (await opened(disk)).publish("made", 0, step)
    return disk, held


async def begin(
    store: CheckpointStore, source: MemoryDisk, wanted: Held, total_bytes: int = 0
) -> Held:
    """What a fetch does with a manifest."""
    await receive_manifest(store, source, wanted)
    return await store.begin(wanted.key, wanted.digest, total_bytes)


async def receive_manifest(store: CheckpointStore, source: MemoryDisk, wanted: Held) -> None:
    sink = await store.manifest_sink(wanted.key, wanted.manifest_bytes)
    sink.write(await source.read(f"{wanted.folder}/.manifest"))
    await sink.commit(sink.finish())


async def receive(store: CheckpointStore, source: MemoryDisk, wanted: Held, index: int) -> None:
    """What a fetch does with a piece."""
    held = store.held(wanted.key)
    assert held is not None
    piece = wanted.manifest.pieces[index]
    sink = store.sink(held, index)
    sink.write(await source.read(wanted.piece_path(index), piece.offset, piece.size_bytes))
    await sink.commit(sink.finish())
    store.landed(held, index)


async def fetch(store: CheckpointStore, source: MemoryDisk, wanted: Held) -> str:
    """A fetch without a network, going on where the last one stopped."""
    held = store.held(wanted.key)
    if held is None or held.digest != wanted.digest:
        await store.discard(wanted.key)
        held = await begin(store, source, wanted)
    for index in held.missing():
        await receive(store, source, wanted, index)
    return await store.finish(held)


def check_store(store: CheckpointStore) -> None:
    """Check that every blob the store offers hashes to its digest."""
    disk = store.disk
    assert isinstance(disk, MemoryDisk)
    for held in store.all():
        for digest in [held.digest, *(piece.digest for piece in held.manifest.pieces)]:
            blob = store.blobs.open(digest)
            if blob is not None:
                data = disk.data(blob.path, blob.offset, blob.size_bytes)
                assert digest_of(bytes(data)) == digest
                blob.release()
        assert held.readers == 0


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
async def test_receiving_survives_a_stop_at_every_point(
    power: bool, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(store_module, "CHECKPOINT_SYNC_BYTES", 1)
    files = [files_of(seed) for seed in range(3)]
    sources = [await published(step, files[step]) for step in range(3)]
    uninterrupted = MemoryDisk()
    store = await opened(uninterrupted, keep=2)
    for source, wanted in sources:
        await fetch(store, source, wanted)
        await store.settle()
    assert store.complete() == [(0, 1), (0, 2)]
    assert uninterrupted.exists("checkpoints/0-2/.complete") == large
    rng = random.Random(0)
    for stop in range(1, uninterrupted.steps + 1):
        disk = MemoryDisk()
        store = await opened(disk, keep=2)
        disk.cut_at = stop
        settled: list[Key] = []
        with pytest.raises(PowerCut):
            for source, wanted in sources:
                await fetch(store, source, wanted)
                await store.settle()
                settled.append(wanted.key)
        done = settled if power else store.complete()
        disk.cut_at = None
        if power:
            disk.recover(rng)
        store = await opened(disk, keep=2)
        check_store(store)
        if large or not power:
            assert set(done) <= set(store.complete()) | {(0, 0)}, "what is settled is durable"
        for key in store.complete():
            assert same_files(disk, f"checkpoints/0-{key[1]}", files[key[1]])
        for source, wanted in sources[1:]:
            await fetch(store, source, wanted)
        check_store(store)
        assert store.complete() == [(0, 1), (0, 2)]
        assert disk.list("checkpoints") == ["0-1", "0-2"], "nothing is left lying about"


async def test_publishing_survives_a_power_cut_at_every_point() -> None:
    files = files_of(1)
    uninterrupted = MemoryDisk()
    store = await opened(uninterrupted)
    await put_folder(uninterrupted, "made", files)
    before = uninterrupted.steps
    await store.publish("made", 0, 7)
    for stop in range(before + 1, uninterrupted.steps + 2):
        disk = MemoryDisk()
        store = await opened(disk)
        await put_folder(disk, "made", files)
        disk.cut_at = stop
        durable = False
        try:
            await store.publish("made", 0, 7)
            durable = True
        except PowerCut:
            pass
        disk.cut_at = None
        disk.recover(random.Random(stop))
        store = await opened(disk)
        check_store(store)
        if not store.complete():
            assert not durable
            assert same_files(disk, "made", files), "the trainer still has its folder"
            await store.publish("made", 0, 7)
        assert same_files(disk, "checkpoints/0-7", files)


async def test_a_restart_keeps_the_pieces_that_hash_right() -> None:
    source, wanted = await published(0, files_of(1, pieces=6))
    disk = MemoryDisk()
    store = await opened(disk)
    await begin(store, source, wanted)
    for index in (0, 2, 4):
        await receive(store, source, wanted, index)
    disk.flip("checkpoints/0-0/model.safetensors", SIZE + 5)
    store = await opened(disk)
    held = store.held((0, 0))
    assert held is not None and held.missing() == [1, 2, 3, 5, 6]
    assert store.blobs.open(wanted.manifest.pieces[2].digest) is None
    assert store.blobs.of(wanted.manifest.pieces[2].digest)
    await fetch(store, source, wanted)
    assert same_files(disk, "checkpoints/0-0", files_of(1, pieces=6))


async def test_a_piece_is_served_once_it_is_committed() -> None:
    source, wanted = await published(0, files_of(1))
    store = await opened(MemoryDisk())
    changes: list[tuple[Change, int]] = []
    store.watch(lambda change, held, index: changes.append((change, index)))
    await begin(store, source, wanted)
    blob = store.blobs.open(wanted.digest)
    assert blob is not None and blob.path == "checkpoints/0-0/.manifest"
    digest = wanted.manifest.pieces[1].digest
    assert store.blobs.open(digest) is None
    await receive(store, source, wanted, 1)
    blob = store.blobs.open(digest)
    assert blob is not None
    assert (blob.path, blob.offset) == ("checkpoints/0-0/model.safetensors", 0)
    assert changes == [(Change.BEGUN, -1), (Change.PIECE, 1)]
    assert store.blobs.open(b"x" * 32) is None and not store.blobs.of(b"x" * 32)


async def test_retention_spares_what_is_pinned_or_being_sent() -> None:
    disk = MemoryDisk()
    store = await opened(disk, keep=2)
    helds: list[Held] = []

    async def publish(step: int) -> None:
        await put_folder(disk, "made", files_of(step))
        helds.append(await store.publish("made", 0, step))

    await publish(0)
    await publish(1)
    store.pin((0, 0))
    reading = store.blobs.open(helds[1].manifest.pieces[1].digest)
    assert reading is not None
    await publish(2)
    await publish(3)
    assert store.complete() == [(0, 0), (0, 1), (0, 2), (0, 3)]
    reading.release()
    await store.trim()
    assert store.complete() == [(0, 0), (0, 2), (0, 3)]
    store.unpin((0, 0))
    await store.trim()
    assert store.complete() == [(0, 2), (0, 3)]
    assert disk.list("checkpoints") == ["0-2", "0-3"]
    assert not store.blobs.of(helds[0].digest)
    # A new lineage supersedes every step of the old one.
    await put_folder(disk, "made", files_of(9))
    await store.publish("made", 1, 0)
    assert store.complete() == [(0, 3), (1, 0)]


async def test_a_superseded_partial_checkpoint_goes() -> None:
    old_source, old = await published(0, files_of(0))
    new_source, new = await published(1, files_of(1))
    store = await opened(MemoryDisk())
    await begin(store, old_source, old)
    store.pin(old.key)
    await fetch(store, new_source, new)
    assert store.held(old.key) is not None
    store.unpin(old.key)
    await store.trim()
    assert store.held(old.key) is None
    assert store.disk.list("checkpoints") == ["0-1"]


@pytest.mark.parametrize("how", ["discarded", "withdrawn", "refused"])
async def test_what_goes_while_older_ones_are_trimmed_goes_once(how: str) -> None:
    disk = MemoryDisk()
    store = await opened(disk)
    many = {f"{number}.txt": b"some" for number in range(10)}  # so that this takes a while
    for step, files in enumerate([many, files_of(1)]):
        await begin(store, *await published(step, files))
    last = store.held((0, 1))
    assert last is not None

    async def remove() -> None:
        assert last is not None
        if how == "discarded":
            await store.discard(last.key)
        elif how == "withdrawn":
            await store.withdraw(last.key)
        else:
            with pytest.raises(BadManifest):
                await store.check_files(last)

    if how == "refused":
        source, wanted = await published(1, files_of(1))
        for index in last.missing():
            await receive(store, source, wanted, index)
        lie = msgspec.structs.replace(last.manifest.files[0], sha256=bytes(32))
        last.manifest.files[0] = lie
        last.unproven.add(0)
    store.pin((0, 0))
    store.pin((0, 1))
    await fetch(store, *await published(2, files_of(2)))
    store.unpin((0, 0))
    store.unpin((0, 1))
    trimming = trio.Event()
    disk.before = lambda operation: trimming.set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.trim)
        await trimming.wait()
        await remove()
    assert disk.list("checkpoints") == ["0-2"]
    recorder: Recorder = store.recorder  # type: ignore[attr-defined]
    removed = [event.fields["step"] for event in recorder.named("shardcast.checkpoint_removed")]
    assert removed == [0, 1]


async def test_publishing_twice_is_once_and_never_two_things() -> None:
    disk = MemoryDisk()
    store = await opened(disk)
    digests = []
    for _ in range(2):
        await put_folder(disk, "made", files_of(1))
        digests.append((await store.publish("made", 0, 1)).digest)
        assert not disk.exists("made")
    assert digests[0] == digests[1]
    await put_folder(disk, "made", files_of(2))
    with pytest.raises(CheckpointConflict, match="0/1 was published with other content"):
        await store.publish("made", 0, 1)
    assert same_files(disk, "checkpoints/0-1", files_of(1))


async def test_what_was_begun_and_left_makes_room_for_what_is_newer() -> None:
    total = sum(len(data) for data in files_of(0).values())
    disk = MemoryDisk(2 * total + 2000)  # and manifests
    store = await opened(disk)
    await fetch(store, *await published(5, files_of(5)))
    source, left = await published(6, files_of(6))
    await begin(store, source, left)
    await receive(store, source, left, 0)
    store.pin((0, 6))  # as long as it is being fetched
    source, wanted = await published(7, files_of(7))
    with pytest.raises(DiskFullError, match="MB are free"):
        await begin(store, source, wanted)
    store.unpin((0, 6))
    await fetch(store, source, wanted)
    assert store.complete() == [(0, 5), (0, 7)]
    assert (await opened(disk)).complete() == [(0, 5), (0, 7)]


async def test_a_checkpoint_larger_than_announced_makes_no_room_for_itself() -> None:
    total = sum(len(data) for data in files_of(0).values())
    store = await opened(MemoryDisk(3 * total + 2000))
    for step in (5, 6):
        await fetch(store, *await published(step, files_of(step)))
    source, large = await published(7, files_of(7, pieces=4))
    with pytest.raises(BadManifest, match=f"announced with {total:,} bytes"):
        await begin(store, source, large, total)
    assert store.complete() == [(0, 5), (0, 6)]
    await begin(store, source, large)
    assert store.complete() == [(0, 6)]


async def test_with_little_disk_fewer_are_kept_and_the_newest_always_is() -> None:
    total = sum(len(data) for data in files_of(0).values())
    disk = MemoryDisk(3 * total + 2000)
    store = await opened(disk)
    for step in range(8):
        await fetch(store, *await published(step, files_of(step)))
        assert store.complete() == [(0, n) for n in range(max(0, step - 2), step + 1)]
    check_store(store)
    # Not even one that is pinned goes to make room, so there is none for a larger one.
    store.pin((0, 5))
    source, large = await published(9, files_of(9, pieces=6))
    with pytest.raises(DiskFullError, match="MB are free"):
        await begin(store, source, large)
    assert store.complete() == [(0, 5), (0, 7)]


@pytest.mark.parametrize("allocated", [0, 1])
async def test_a_stop_before_there_was_room_for_the_files_does_not_keep_it_from_starting(
    allocated: int,
) -> None:
    """Killed when the manifest is here and so many of its two files are."""
    published_files = [files_of(step) for step in range(4)]
    total = sum(len(data) for data in published_files[0].values())
    disk = MemoryDisk(capacity=3 * total + 5000)  # and manifests
    store = await opened(disk, keep=2)
    for step in range(2):
        await fetch(store, *await published(step, published_files[step]))
    source, wanted = await published(3, published_files[3])
    sink = await store.manifest_sink(wanted.key, wanted.manifest_bytes)
    sink.write(await source.read(f"{wanted.folder}/.manifest"))
    await sink.commit(sink.finish())
    for file in wanted.manifest.files[:allocated]:
        await disk.allocate(f"checkpoints/0-3/{file.name}", file.size_bytes)
    disk.capacity_bytes -= total  # somebody else takes the room
    store = await opened(disk, keep=2)
    assert store.complete() == [(0, 0), (0, 1)]
    assert disk.list("checkpoints") == ["0-0", "0-1"]
    # From here on it makes room as always.
    folder = await fetch(store, source, wanted)
    assert same_files(disk, folder, published_files[3])
    assert store.complete() == [(0, 1), (0, 3)]


async def test_a_manifest_that_contradicts_itself_is_refused_with_its_files() -> None:
    source, wanted = await published(0, files_of(0))
    honest = wanted.manifest
    file = type(honest.files[1])("model.safetensors", honest.files[1].size_bytes, b"x" * 32)
    lying = CheckpointManifest(
        run=RUN, lineage=0, step=0, piece_size=SIZE,
        files=[honest.files[0], file], pieces=honest.pieces,
    )  # fmt: skip
    await source.write(f"{wanted.folder}/.manifest", lying.encode())
    wanted.manifest = lying
    wanted.manifest_bytes = len(lying.encode())
    wanted.digest = digest_of(lying.encode())
    store = await opened(MemoryDisk())
    await fetch(store, source, wanted)
    held = store.held(wanted.key)
    assert held is not None
    held.unproven.add(1)
    with pytest.raises(BadManifest, match="does not have the SHA-256"):
        await store.check_files(held)
    assert store.disk.list("checkpoints") == []


async def test_bytes_the_disk_lost_before_files_are_checked_are_fetched_again() -> None:
    files = files_of(0, pieces=3)
    source, wanted = await published(0, files)
    disk = MemoryDisk()
    store = await opened(disk)
    held = await begin(store, source, wanted)
    for index in range(4):
        await receive(store, source, wanted, index)
    held.unproven |= {0, 1}
    await store.check_files(held)
    assert held.missing() == [] and not held.unproven
    disk.flip("checkpoints/0-0/model.safetensors", 3)
    held.unproven.add(1)
    await store.check_files(held)
    assert held.missing() == [1] and held.unproven == {1}
    await fetch(store, source, wanted)
    assert same_files(disk, "checkpoints/0-0", files)


@pytest.mark.parametrize("spoilt", [False, True])
async def test_a_file_is_hashed_while_its_pieces_are_made(spoilt: bool) -> None:
    source, wanted = await published(0, files_of(0, pieces=3))
    disk = MemoryDisk()
    store = await opened(disk)
    held = await begin(store, source, wanted)
    held.unproven.add(1)
    offsets: list[int] = []

    async def ready(offset: int) -> int:
        """The piece after `offset` arrives, and one before it changes."""
        offsets.append(offset)
        if spoilt and offset == 2 * SIZE:
            disk.flip("checkpoints/0-0/model.safetensors", SIZE)
        index = 1 + offset // SIZE
        await receive(store, source, wanted, index)
        piece = held.manifest.pieces[index]
        return piece.offset + piece.size_bytes

    await store.check_file(held, 1, ready)
    assert offsets == [0, SIZE, 2 * SIZE]
    # In the simulated disk a hash is of the file's last state; a real one hashes what it reads.
    assert held.unproven == ({1} if spoilt else set())


async def test_a_tiny_received_checkpoint_is_not_synced() -> None:
    source, wanted = await published(0, files_of(0))
    disk = MemoryDisk()
    await fetch(await opened(disk), source, wanted)
    assert disk.syncs == 0


async def test_a_large_received_checkpoint_is_used_first_and_synced_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "CHECKPOINT_SYNC_BYTES", 1)
    disk = MemoryDisk()
    store = await opened(disk)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.settle_received)
        await fetch(store, *await published(0, files_of(0)))
        assert store.complete() == [(0, 0)] and disk.syncs == 0
        await trio.testing.wait_all_tasks_blocked()
        assert disk.syncs > 0 and disk.exists("checkpoints/0-0/.complete")

        async def fail(path: str) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(disk, "sync", fail)
        await fetch(store, *await published(1, files_of(1)))
        await trio.testing.wait_all_tasks_blocked()
        assert store.complete() == [(0, 0), (0, 1)]
        assert not disk.exists("checkpoints/0-1/.complete")
        recorder: Recorder = store.recorder  # type: ignore[attr-defined]
        assert len(recorder.named("shardcast.not_synced")) == 1
        nursery.cancel_scope.cancel()


# --- adapters --------------------------------------------------------------------------------


async def adapter(disk: MemoryDisk, base: Held, step: int) -> CheckpointManifest:
    """The manifest of an adapter in the folder `made`."""
    await put_folder(disk, "made", {"adapter_model.safetensors": b"%d" % step})
    manifest = await build(disk, "made", run=RUN, lineage=0, step=step)
    return msgspec.structs.replace(manifest, base=base.reference)


async def test_the_base_of_adapters_outlives_them() -> None:
    disk = MemoryDisk()
    store = await opened(disk, keep=2)
    await put_folder(disk, "made", files_of(0))
    base = await store.publish("made", 0, 0)
    for step in range(1, 6):
        manifest = await adapter(disk, base, step)
        held = await store.publish("made", 0, step, manifest=manifest)
        assert await disk.read(f"{held.folder}/{BASE_NAME}") == b"../0-0"
    assert store.complete() == [(0, 0), (0, 4), (0, 5)]
    again = await opened(disk, keep=2)
    assert again.complete() == [(0, 0), (0, 4), (0, 5)]

    worker = await opened(MemoryDisk(), keep=2)  # its base is fetched after an adapter
    for step in (4, 5):
        wanted = again.held((0, step))
        assert wanted is not None
        await receive_all(worker, disk, wanted)
    first = await begin(worker, disk, base)
    await receive(worker, disk, base, 0)
    await worker.trim()
    assert worker.held((0, 0)) is first and not first.complete
    assert await worker.disk.read(f"checkpoints/0-5/{BASE_NAME}") == b"../0-0"


async def test_a_base_is_older_than_its_adapter() -> None:
    disk = MemoryDisk()
    store = await opened(disk)
    await put_folder(disk, "made", files_of(0))
    base = await store.publish("made", 0, 3)
    manifest = await adapter(disk, base, 3)
    with pytest.raises(BadManifest, match="names policy 3 of lineage 0 as its base, which is"):
        check(manifest)


async def receive_all(store: CheckpointStore, source: MemoryDisk, wanted: Held) -> None:
    held = await begin(store, source, wanted)
    for index in range(len(wanted.manifest.pieces)):
        await receive(store, source, wanted, index)
    await store.finish(held)


@pytest.mark.parametrize("left", [None, b"", b"../0-7"])
async def test_a_start_links_an_adapter_to_its_base_again(left: bytes | None) -> None:
    """A peer that died before it had written the link, or whose link a power cut damaged."""
    disk = MemoryDisk()
    await put_folder(disk, "made", files_of(0))
    store = await opened(disk)
    base = await store.publish("made", 0, 0)
    held = await store.publish("made", 0, 1, manifest=await adapter(disk, base, 1))
    link = f"{held.folder}/{BASE_NAME}"
    await disk.remove(link)
    if left is not None:
        await disk.write(link, left)
    again = await opened(disk)
    assert again.complete() == [(0, 0), (0, 1)]
    assert await disk.read(link) == b"../0-0"
