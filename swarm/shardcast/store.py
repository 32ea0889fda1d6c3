"""The store of checkpoints on this peer's disk, complete and partial (decision 5).

    checkpoints/<lineage>-<step>/            the files in place, and `.manifest`
    checkpoints/<lineage>-<step>/.complete   nothing in this folder needs to be hashed again
    checkpoints/<lineage>-<step>.delta/      the same for the delta that leads to it
    checkpoints/<lineage>-<step>.removed/    being deleted
    checkpoints/.spare/                      pieces requested from several sources at once

The store knows which checkpoints are complete; their folders do not show it. At start every piece
on disk is hashed, unless its checkpoint is marked: a received one of `CHECKPOINT_SYNC_BYTES` or
more is fsynced in the background (`settle`) while it is already in use. A *published* checkpoint is
always durable before `publish` returns."""

import re
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio

from swarm.errors import DiskFullError, SwarmError
from swarm.events import Events
from swarm.shardcast import limits
from swarm.shardcast.held import (
    COMPLETE_NAME,
    BlobIndex,
    Change,
    Held,
    Key,
    Watcher,
    allocate,
    delta_key,
    is_in,
    is_right,
    read_back,
)
from swarm.shardcast.manifest import (
    BASE_NAME,
    MANIFEST_NAME,
    BadManifest,
    CheckpointManifest,
    build,
    digest_of,
    parse,
)
from swarm.wire.messages import CheckpointReference
from swarm.world import Disk, Ready, Sink

CHECKPOINT_SYNC_BYTES = 64 * 1024 * 1024
"""A received checkpoint at least this large is fsynced when complete, and trusted at the next
start. A smaller one is not fsynced but hashed at the next start, which is cheaper."""

SEEDING_BYTES_MIN = 256 * 1024 * 1024
"""Size from which a published checkpoint is super-seeded: each piece is sent once before any is
sent twice. A smaller one reaches every peer before that matters."""

_FOLDER = re.compile(r"(0|[1-9][0-9]{0,15})-(0|[1-9][0-9]{0,15})(\.delta)?")
ROOT = "checkpoints"
_SPARE_NAME = ".spare"
ENCODING_NAME = ".encoding"
"""Folder in which a delta is made before it is published."""


class CheckpointConflict(SwarmError):
    """Two different manifests claim the same (lineage, step)."""


class CheckpointStore:
    """All checkpoints of one run on this peer. Call `recover()` first."""

    def __init__(
        self, disk: Disk, run: str, events: Events, *, keep: int = limits.CHECKPOINTS_KEPT
    ) -> None:
        self.disk = disk
        self.run = run
        self._events = events
        self.keep = keep
        """Number of complete checkpoints kept: the newest ones."""
        self._held: dict[Key, Held] = {}
        self._done: set[Key] = set()
        """Complete checkpoints, without deltas."""
        self.blobs = BlobIndex()
        self._pins: Counter[Key] = Counter()
        self._watchers: list[Watcher] = []
        self._trimming = trio.Lock()
        self._seeding: list[Held] = []
        """Checkpoints published here; the last one of them has pieces that were never sent."""
        self._spares = 0
        self._unsettled: list[Held] = []
        """Large received checkpoints, complete, that are not fsynced yet."""
        self._received = trio.Event()

    # --- reading -----------------------------------------------------------------------------

    def complete(self) -> list[Key]:
        """Complete checkpoints, oldest first."""
        return sorted(self._done)

    def held(self, key: Key) -> Held | None:
        """The checkpoint or delta with this key, complete or not; None without its manifest."""
        return self._held.get(key)

    def base_of(self, held: Held) -> Held | None:
        """The checkpoint that an adapter adapts, if its manifest is on disk."""
        return None if held.base_key is None else self._held.get(held.base_key)

    def all(self) -> list[Held]:
        """Every checkpoint and delta whose manifest is on disk, oldest first."""
        return [self._held[key] for key in sorted(self._held)]

    def watch(self, watcher: Watcher) -> None:
        self._watchers.append(watcher)

    def _notify(self, change: Change, held: Held, index: int = -1) -> None:
        for watcher in self._watchers:
            watcher(change, held, index)

    # --- keeping -----------------------------------------------------------------------------

    def pin(self, key: Key) -> None:
        """Keep a checkpoint, present or still to arrive, until it was unpinned as often."""
        self._pins[key] += 1

    def unpin(self, key: Key) -> None:
        self._pins[key] -= 1
        if self._pins[key] <= 0:
            del self._pins[key]

    @contextmanager
    def pinned(self, *wanted: CheckpointReference | Key) -> Iterator[None]:
        """Keep checkpoints, present or still to arrive, inside this block."""
        keys = [each if isinstance(each, tuple) else (each.lineage, each.step) for each in wanted]
        for key in keys:
            self.pin(key)
        try:
            yield
        finally:
            for key in keys:
                self.unpin(key)

    async def trim(self) -> None:
        """Remove checkpoints and deltas that are not kept, unless pinned or being sent.

        Not kept are: complete checkpoints older than the newest `keep`; partial checkpoints older
        than the newest complete one; older deltas that the newest complete one does not name. The
        base of an adapter in the store is always kept."""
        async with self._trimming:
            complete = self.complete()
            if not complete:
                return
            newest = self._held[complete[-1]]
            live = {link.manifest for link in newest.manifest.deltas}
            old = set(complete[: -self.keep])
            rest = [k for k, held in self._held.items() if held.is_delta or not held.complete]
            for held in [self._held[key] for key in sorted(old.union(rest))]:
                if held.is_delta:
                    superseded = held.key < delta_key(newest.key) and held.digest not in live
                else:
                    superseded = held.key in old or (not held.complete and held.key < newest.key)
                # Its adapter may have come while another one was removed.
                if superseded and self._is_free(held) and held.key not in self._bases():
                    await self._remove(held)

    def _bases(self) -> set[Key]:
        return {held.base_key for held in self._held.values() if held.base_key is not None}

    def _is_free(self, held: Held) -> bool:
        return not held.readers and held.key not in self._pins

    async def _remove(self, held: Held) -> None:
        """Remove a checkpoint from the store. Call this under `_trimming`, never twice at once."""
        del self._held[held.key]
        self._done.discard(held.key)
        held.unsent = 0
        self.blobs.remove(held)
        self._notify(Change.REMOVED, held)
        # `_delete` renames first: after a crash a half deleted folder must not pass as a
        # checkpoint.
        await self._delete(held.folder)
        self._events.emit(
            "shardcast.checkpoint_removed",
            lineage=held.key[0],
            step=held.key[1],
            delta=held.is_delta,
        )

    async def _delete(self, folder: str) -> None:
        doomed = folder + ".removed"
        await self.disk.remove(doomed)
        if self.disk.exists(folder):
            await self.disk.rename(folder, doomed)
            await self.disk.remove(doomed)

    def _remember(self, held: Held) -> None:
        self._held[held.key] = held
        self._done.discard(held.key)
        if held.complete and not held.is_delta:
            self._done.add(held.key)
        self.blobs.add(held)
        self._notify(Change.BEGUN, held)

    def _name(self, key: Key) -> str:
        return f"{ROOT}/{key[0]}-{key[1]}" + (".delta" if len(key) > 2 else "")

    # --- receiving ---------------------------------------------------------------------------

    async def manifest_sink(self, key: Key, size_bytes: int) -> Sink:
        """A sink for the manifest of a checkpoint about to be fetched; call `begin` after it."""
        path = f"{self._name(key)}/{MANIFEST_NAME}"
        async with self._trimming:  # a folder of this name may be being removed
            await self.disk.allocate(path, size_bytes)
        return self.disk.sink(path, 0, size_bytes)

    async def begin(
        self, key: Key, digest: bytes, total_bytes: int = 0, *, all_files: bool = True
    ) -> Held:
        """Read a partial checkpoint's committed manifest; preallocate its files, or leave that to
        `want`.

        `total_bytes` was announced; 0: unknown. A manifest with another size makes no room for
        itself at the cost of other checkpoints.

        Raises `BadManifest` and `DiskFullError`; its folder is then removed."""
        folder = self._name(key)
        blob = await self.disk.read(f"{folder}/{MANIFEST_NAME}")
        try:
            manifest = parse(blob)
            if (manifest.run, manifest.lineage, manifest.step) != (self.run, *key[:2]):
                raise BadManifest(
                    f"the manifest announced for {self.run} {key[0]}/{key[1]} is one of "
                    f"{manifest.run[:200]} {manifest.lineage}/{manifest.step}"
                )
            if total_bytes not in (0, manifest.total_bytes):
                raise BadManifest(
                    f"checkpoint {key[0]}/{key[1]} was announced with {total_bytes:,} bytes, and "
                    f"its manifest lists {manifest.total_bytes:,}"
                )
            held = Held(manifest, digest, len(blob), folder, is_delta=len(key) > 2)
            if all_files:
                await self._make_sure_of_room(held, manifest.total_bytes)
                await allocate(self.disk, held)
            await self._link_base(folder, manifest)
        except (BadManifest, DiskFullError):
            await self._delete(folder)
            raise
        self._remember(held)
        return held

    async def want(self, held: Held, folders: Collection[str]) -> None:
        """Preallocate the files of some folders of a partial checkpoint.

        Raises `BadManifest` for a folder that it does not have, and `DiskFullError`."""
        files = held.manifest.files
        for folder in folders:
            if not any(is_in(file.name, [folder]) for file in files):
                raise BadManifest(
                    f"checkpoint {held.key[0]}/{held.key[1]} has no files in the folder {folder!r}"
                )
        new = [
            file.size_bytes
            for file in files
            if is_in(file.name, folders) and not self.disk.exists(f"{held.folder}/{file.name}")
        ]
        await self._make_sure_of_room(held, sum(new))
        await allocate(self.disk, held, folders)

    async def _link_base(self, folder: str, manifest: CheckpointManifest) -> None:
        """Note in an adapter's folder where its base is, for the engines that load it."""
        if manifest.base is not None:
            base = self._name((manifest.base.lineage, manifest.base.step))
            link = f"../{base.removeprefix(f'{ROOT}/')}"
            await self.disk.write(f"{folder}/{BASE_NAME}", link.encode())

    async def _make_sure_of_room(self, new: Held, total: int) -> None:
        """Make room for `total` bytes of a new checkpoint; raises `DiskFullError`.

        If necessary, removes unused older checkpoints, incomplete ones first: a peer with little
        disk keeps fewer. The newest complete one stays, the next delta's base, and adapters'
        bases."""
        if total <= self.disk.free_bytes():
            return  # as nearly always, and of 60 trainers' shards each asks
        partial = [held.key for held in self.all() if not held.complete]
        for key in [*partial, *self.complete()[:-1], None]:
            room = self.disk.free_bytes()
            if total <= room:
                return
            async with self._trimming:
                held = self._held.get(key) if key is not None else None
                bases = {*self._bases(), new.base_key}  # now: an adapter may have come meanwhile
                may_go = held is not None and held.key not in bases and held.key < new.key
                if held is not None and may_go and self._is_free(held):
                    await self._remove(held)
        raise DiskFullError(
            f"checkpoint {new.key[0]}/{new.key[1]} needs {total / 1e6:.1f} MB but only "
            f"{room / 1e6:.1f} MB are free; free some space or move --home to a larger disk"
        )

    def sink(self, held: Held, index: int) -> Sink:
        """A sink for a missing piece; one at a time per piece, since it may write in place."""
        piece = held.manifest.pieces[index]
        return self.disk.sink(held.piece_path(index), piece.offset, piece.size_bytes)

    @asynccontextmanager
    async def spare_file(self, size_bytes: int) -> AsyncIterator[str]:
        """A file for a piece that another attempt is writing in place; removed with the block.

        Raises `DiskFullError`: room is made for checkpoints only."""
        self._spares += 1
        path = f"{ROOT}/{_SPARE_NAME}/{self._spares}"
        await self.disk.allocate(path, size_bytes)
        try:
            yield path
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                await self.disk.remove(path)

    def landed(self, held: Held, index: int) -> None:
        """Note that a verified piece was committed to its `sink`; it is served from now on."""
        held.pieces[index] = 1
        self._notify(Change.PIECE, held, index)

    async def check_files(self, held: Held) -> None:
        for number in sorted(held.unproven):
            await self.check_file(held, number)

    async def check_file(self, held: Held, number: int, ready: Ready | None = None) -> None:
        """Compare the SHA-256 of a file with the manifest; `ready`: while it is being made.

        Pieces that the disk lost since they were verified are marked as missing. Raises
        `BadManifest` when every piece of the file is right but the file is not: then the manifest
        contradicts itself."""
        file = held.manifest.files[number]
        if await self.disk.sha256(f"{held.folder}/{file.name}", ready) == file.sha256:
            held.unproven.discard(number)
            return
        pieces = enumerate(held.manifest.pieces)
        own = [index for index, piece in pieces if piece.file == number]
        lost = [index for index in own if not await is_right(self.disk, held, index)]
        for index in lost:
            held.pieces[index] = 0
        if not lost:
            await self.withdraw(held.key)
            raise BadManifest(
                f"{file.name!r} of checkpoint {held.key[0]}/{held.key[1]} does not have the "
                "SHA-256 that its manifest states although every piece is right"
            )
        self._events.emit("shardcast.pieces_lost", file=file.name, pieces=len(lost))

    async def copy_known(self, held: Held, folders: Collection[str] = ()) -> None:
        """Copy missing pieces that another checkpoint in the store has (of unchanged files)."""
        for index in held.missing(folders):
            reference = held.manifest.pieces[index]
            blob = self.blobs.open(reference.digest)
            if blob is None:
                continue
            sink = self.sink(held, index)
            try:
                await self.disk.copy(blob.path, blob.offset, blob.size_bytes, sink)
                piece = sink.finish()
                if piece.size_bytes == reference.size_bytes and piece.verify(reference.digest):
                    await sink.commit(piece)
                    self.landed(held, index)
            finally:
                blob.release()
                sink.abandon()
            # Small pieces are copied without a thread: let other tasks run in between.
            await trio.lowlevel.checkpoint()

    async def finish(self, held: Held) -> str:
        """Mark a checkpoint with all its pieces as complete, and trim; returns its folder."""
        if not held.complete:
            if missing := held.missing():
                raise ValueError(f"checkpoint {held.key} lacks {len(missing)} pieces")
            self._complete(held)
        await self.trim()
        return held.folder

    def _complete(self, held: Held) -> None:
        held.complete = True
        if not held.is_delta and self._held.get(held.key) is held:
            self._done.add(held.key)
        if held.manifest.total_bytes >= CHECKPOINT_SYNC_BYTES:
            self._unsettled.append(held)
            self._received.set()
        self._notify(Change.COMPLETE, held)

    async def settle_received(self) -> None:
        """Settle each large checkpoint once it is complete, until cancelled."""
        while True:
            await self._received.wait()
            await self.settle()

    async def settle(self) -> None:
        """Fsync and mark the large received checkpoints, so that no start hashes them again.

        A disk error is reported as an event; the next start then hashes the checkpoint."""
        self._received = trio.Event()
        while self._unsettled:
            held = self._unsettled.pop(0)
            if self._held.get(held.key) is not held:  # removed meanwhile
                continue
            try:
                with self.pinned(held.key):
                    await self.disk.sync(held.folder)
                    if self._held.get(held.key) is held:
                        await self.disk.write(f"{held.folder}/{COMPLETE_NAME}", b"")
            except (OSError, SwarmError) as error:
                self._events.emit(
                    "shardcast.not_synced", lineage=held.key[0], step=held.key[1], reason=str(error)
                )

    async def discard(self, key: Key) -> None:
        """Remove a partial checkpoint, even if its manifest has not arrived."""
        async with self._trimming:
            held = self._held.get(key)
            if held is None:
                await self._delete(self._name(key))
            elif not held.complete:
                await self._remove(held)

    async def withdraw(self, key: Key) -> None:
        """Remove a checkpoint, complete or not, that was not announced or must not be used."""
        async with self._trimming:
            held = self._held.get(key)
            if held is not None:
                await self._remove(held)

    # --- publishing --------------------------------------------------------------------------

    async def publish(
        self,
        folder: str,
        lineage: int,
        step: int,
        *,
        manifest: CheckpointManifest | None = None,
        is_delta: bool = False,
    ) -> Held:
        """Move a folder on this disk into the store as a checkpoint, with its manifest.

        `manifest` is trusted if given; else the folder is hashed. With `is_delta`, the folder is
        the delta that leads to (lineage, step). Everything is durable before this returns.

        Publishing the same content again returns the existing checkpoint; other content under the
        same (lineage, step) raises `CheckpointConflict`."""
        key = delta_key((lineage, step)) if is_delta else (lineage, step)
        if manifest is None:
            manifest = await build(self.disk, folder, run=self.run, lineage=lineage, step=step)
        blob = manifest.encode()
        known = self._held.get(key)
        if known is not None and known.complete:
            # Deltas and mirrors may differ: they are only ways to get the content.
            if (known.manifest.files, known.manifest.pieces) != (manifest.files, manifest.pieces):
                raise CheckpointConflict(
                    f"checkpoint {lineage}/{step} was published with other content; continue "
                    "with the next step, or open a new lineage"
                )
            await self.disk.remove(folder)
            return known
        await self.discard(key)
        await self.disk.write(f"{folder}/{MANIFEST_NAME}", blob)
        await self._link_base(folder, manifest)
        await self.disk.sync(folder)
        if manifest.total_bytes >= CHECKPOINT_SYNC_BYTES:
            await self.disk.write(f"{folder}/{COMPLETE_NAME}", b"")
        final = self._name(key)
        await self.disk.rename(folder, final)
        await self.disk.sync(final)
        held = Held(manifest, digest_of(blob), len(blob), final, complete=True, is_delta=is_delta)
        if manifest.total_bytes >= SEEDING_BYTES_MIN:
            held.unsent = (1 << len(manifest.pieces)) - 1
            self._seeding.append(held)
        self._remember(held)
        self._notify(Change.COMPLETE, held)
        await self.trim()
        return held

    @property
    def is_seeding(self) -> bool:
        """Whether a checkpoint published here has pieces that were never sent."""
        while self._seeding and not self._seeding[-1].unsent:
            self._seeding.pop()
        return bool(self._seeding)

    def leave(self, digest: bytes) -> bool:
        """Note a request for a blob. False if it is a piece that was sent already while other
        pieces of its checkpoint were not."""
        may = True
        for held, index in self.blobs.of(digest):
            if held.unsent and index >= 0:
                if held.unsent >> index & 1:
                    held.unsent ^= 1 << index
                    self._notify(Change.LEFT, held, index)
                    return True
                may = False
        return may

    def end_seeding(self, digest: bytes) -> None:
        """End super-seeding of the checkpoints that this piece or manifest belongs to."""
        for held, index in self.blobs.of(digest):
            if held.unsent:
                held.unsent = 0
                self._notify(Change.LEFT, held, index)

    # --- starting ----------------------------------------------------------------------------

    async def recover(self) -> None:
        """Load the checkpoints on disk, as far as their hashes are right. Call it once, first.

        None is removed until another one is complete: no role has said yet how many it needs."""
        for name in (_SPARE_NAME, ENCODING_NAME):
            await self.disk.remove(f"{ROOT}/{name}")
        for name in self.disk.list(ROOT):
            path = f"{ROOT}/{name}"
            match = _FOLDER.fullmatch(name)
            if match is None:
                if name.endswith(".removed"):
                    await self.disk.remove(path)
                continue
            key: Key = (int(match[1]), int(match[2]))
            held = await read_back(self.disk, self.run, path, delta_key(key) if match[3] else key)
            if held is None:
                await self._delete(path)
                continue
            # A crash may have lost it: it is written after the manifest, and not fsynced.
            await self._link_base(path, held.manifest)
            self._remember(held)
            if not held.complete and not held.missing():
                self._complete(held)
        for held in self.all():
            self._events.emit(
                "shardcast.checkpoint_found",
                lineage=held.key[0],
                step=held.key[1],
                delta=held.is_delta,
                complete=held.complete,
                pieces=len(held.pieces) - len(held.missing()),
                pieces_all=len(held.pieces),
            )
