"""Checkpoints on this peer's disk: complete ones, and those still arriving.

    checkpoints/<lineage>-<step>/            the files in place, and `.manifest`
    checkpoints/<lineage>-<step>/.complete   nothing in this folder needs to be hashed again
    checkpoints/<lineage>-<step>.delta/      the same for the delta that leads to it
    checkpoints/<lineage>-<step>.removed/    being deleted
    checkpoints/.spare/                      pieces that are asked of several sources at once

Pieces are written into preallocated files under their final names and nothing is renamed when the
last one lands, so a file never moves while it is being sent. The store knows which checkpoints are
complete; their folders do not show it.

There is no journal. At start every piece on disk is hashed, and a fetch resumes with those that do
not match. So a *received* checkpoint below `CHECKPOINT_SYNC_BYTES` is never fsynced; a power cut
costs at most a fetch. A larger one is fsynced in the background (`settling`) while it is in use
already, then marked, and not hashed again: reading hundreds of gigabytes at each start would cost
more. A *published* checkpoint is always durable before `publish` returns.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from swarm.errors import DiskFullError, SwarmError
from swarm.events import Events
from swarm.shardcast import limits
from swarm.shardcast.held import Change, Held, Key, Watcher, delta_key
from swarm.shardcast.index import BlobIndex
from swarm.shardcast.manifest import (
    MANIFEST_NAME,
    BadManifest,
    CheckpointManifest,
    build,
    digest_of,
    parse,
)
from swarm.shardcast.recovery import COMPLETE_NAME, allocate, is_right, read_back
from swarm.shardcast.seeding import Seeding
from swarm.shardcast.settling import Settler
from swarm.transport import OpenBlob
from swarm.world import Disk, Sink

CHECKPOINT_SYNC_BYTES = 64 * 1024 * 1024
"""A received checkpoint at least this large is fsynced when complete and trusted at the next
start; a smaller one is not fsynced but hashed again at the next start, which is cheaper."""

_FOLDER = re.compile(r"(0|[1-9][0-9]{0,15})-(0|[1-9][0-9]{0,15})(\.delta)?")
_SPARE_NAME = ".spare"
ENCODING_NAME = ".encoding"
"""Where a delta is made before it is published."""


class CheckpointConflict(SwarmError):
    """Two different manifests claim the same (lineage, step)."""


class CheckpointStore:
    """All checkpoints of one run on this peer. `recover()` first."""

    def __init__(
        self,
        disk: Disk,
        run: str,
        events: Events,
        *,
        keep: int = limits.CHECKPOINTS_KEPT,
        quota_bytes: int | None = None,
        root: str = "checkpoints",
    ) -> None:
        self.disk = disk
        self.run = run
        self._events = events
        self.keep = keep
        """Complete checkpoints kept, the newest ones."""
        self._quota_bytes = quota_bytes
        self.root = root
        self._held: dict[Key, Held] = {}
        self._index = BlobIndex()
        self.seeding = Seeding(self._index, self._notify)
        self._pins: Counter[Key] = Counter()
        self._watchers: list[Watcher] = []
        self._trimming = trio.Lock()
        self._spares = 0
        self.settler = Settler(self, events)

    # --- reading -----------------------------------------------------------------------------

    def complete(self) -> list[Key]:
        """Complete checkpoints, oldest first."""
        return sorted(k for k, held in self._held.items() if held.complete and not held.is_delta)

    def held(self, key: Key) -> Held | None:
        """A checkpoint or delta whose manifest is here, complete or not."""
        return self._held.get(key)

    def named(self, digest: bytes) -> Held | None:
        """The checkpoint whose manifest has this digest."""
        return self._index.named(digest)

    def all(self) -> list[Held]:
        """Every checkpoint and delta whose manifest is here, oldest first."""
        return [self._held[key] for key in sorted(self._held)]

    def knows(self, digest: bytes) -> bool:
        """Whether a manifest here names this blob, be it present or still missing."""
        return bool(self._index.of(digest))

    def has(self, digest: bytes) -> bool:
        """Whether a piece or manifest is here to be sent."""
        return self._index.has(digest)

    def open(self, digest: bytes) -> OpenBlob | None:
        """A piece or manifest to send, if it is present; the checkpoint stays until released."""
        return self._index.open(digest)

    def watch(self, watcher: Watcher) -> None:
        """Call `watcher` at every change, from now on."""
        self._watchers.append(watcher)

    def _notify(self, change: Change, held: Held, index: int = -1) -> None:
        for watcher in self._watchers:
            watcher(change, held, index)

    # --- keeping -----------------------------------------------------------------------------

    def pin(self, key: Key) -> None:
        """Keep a checkpoint (now, or once it arrives) until as many `unpin`s."""
        self._pins[key] += 1

    def unpin(self, key: Key) -> None:
        self._pins[key] -= 1
        if self._pins[key] <= 0:
            del self._pins[key]

    async def trim(self) -> None:
        """Remove what is not kept: complete ones older than the newest `keep`, partial ones that
        a complete one supersedes, and deltas that the newest one does not name; never what is
        pinned or being sent."""
        async with self._trimming:
            complete = self.complete()
            if not complete:
                return
            newest = self._held[complete[-1]]
            live = {link.manifest for link in newest.manifest.deltas}
            old = set(complete[: -self.keep])
            for held in self.all():
                if held.is_delta:
                    superseded = held.key < delta_key(newest.key) and held.digest not in live
                else:
                    superseded = held.key in old or (not held.complete and held.key < newest.key)
                if superseded and self._is_free(held):
                    await self._remove(held)

    def _is_free(self, held: Held) -> bool:
        return not held.readers and held.key not in self._pins

    async def _remove(self, held: Held) -> None:
        """Remove a checkpoint of the store. Call it under `_trimming`, so that it happens once."""
        self._forget(held)
        # Renamed first: a folder half deleted by a crash must not be taken for a checkpoint.
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
        self._index.add(held)
        self._notify(Change.BEGUN, held)

    def _forget(self, held: Held) -> None:
        del self._held[held.key]
        self.seeding.forget(held.key)
        self.settler.forget(held.key)
        self._index.remove(held)
        self._notify(Change.REMOVED, held)

    def _name(self, key: Key) -> str:
        return f"{self.root}/{key[0]}-{key[1]}" + (".delta" if len(key) > 2 else "")

    # --- receiving ---------------------------------------------------------------------------

    async def manifest_sink(self, key: Key, size_bytes: int) -> Sink:
        """A sink for the manifest blob of a checkpoint about to be fetched; then `begin`."""
        path = f"{self._name(key)}/{MANIFEST_NAME}"
        async with self._trimming:  # this folder may be on its way out
            await self.disk.allocate(path, size_bytes)
        return self.disk.sink(path, 0, size_bytes)

    async def begin(self, key: Key, digest: bytes) -> Held:
        """Read the committed manifest of a partial checkpoint and make room for its files.

        Raises `BadManifest` and `DiskFullError`; its folder is then gone.
        """
        folder = self._name(key)
        blob = await self.disk.read(f"{folder}/{MANIFEST_NAME}")
        try:
            manifest = parse(blob)
            if (manifest.run, manifest.lineage, manifest.step) != (self.run, *key[:2]):
                raise BadManifest(
                    f"the manifest announced for {self.run} {key[0]}/{key[1]} is one of "
                    f"{manifest.run[:200]} {manifest.lineage}/{manifest.step}"
                )
        except BadManifest:
            await self._delete(folder)
            raise
        held = Held(manifest, digest, len(blob), folder, is_delta=len(key) > 2)
        held.pieces = bytearray(len(manifest.pieces))
        try:
            await self._make_sure_of_room(held)
            await allocate(self.disk, held)
        except DiskFullError:
            await self._delete(folder)
            raise
        self._remember(held)
        return held

    async def _make_sure_of_room(self, new: Held) -> None:
        """Make room for a new checkpoint, if need be by removing unused older ones, incomplete ones
        first: a peer with little disk keeps fewer. The newest complete one stays: it is the base of
        the next delta."""
        total = new.manifest.total_bytes
        partial = [held.key for held in self.all() if not held.complete]
        for key in [*partial, *self.complete()[:-1], None]:
            room, whose = self._room()
            if total <= room:
                return
            async with self._trimming:
                held = self._held.get(key) if key is not None else None
                if held is not None and self._is_free(held) and held.key < new.key:
                    await self._remove(held)
        raise DiskFullError(
            f"checkpoint {new.key[0]}/{new.key[1]} needs {total / 1e6:.1f} MB but only "
            f"{max(room, 0) / 1e6:.1f} MB {whose}; free some space or move --home to a "
            "larger disk"
        )

    def _room(self) -> tuple[int, str]:
        """Bytes for another checkpoint, and a clause that says which limit they come from."""
        room, whose = self.disk.free_bytes(), "are free on this disk"
        if self._quota_bytes is not None:
            used = sum(held.manifest.total_bytes for held in self._held.values())
            if self._quota_bytes - used < room:
                room, whose = self._quota_bytes - used, "are left of this peer's quota"
        return room, whose

    def sink(self, held: Held, index: int) -> Sink:
        """Where a missing piece goes; one writer at a time, since it may write in place."""
        piece = held.manifest.pieces[index]
        return self.disk.sink(held.piece_path(index), piece.offset, piece.size_bytes)

    @asynccontextmanager
    async def spare_file(self, size_bytes: int) -> AsyncIterator[str]:
        """A file for a piece that another attempt is writing in place; removed with the block.

        Raises `DiskFullError`: room is made for checkpoints only.
        """
        self._spares += 1
        path = f"{self.root}/{_SPARE_NAME}/{self._spares}"
        await self.disk.allocate(path, size_bytes)
        try:
            yield path
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                await self.disk.remove(path)

    def landed(self, held: Held, index: int) -> None:
        """A verified piece was committed to its `sink`; from now on it is served."""
        held.pieces[index] = 1
        self._notify(Change.PIECE, held, index)

    async def check_files(self, held: Held) -> None:
        """Compare the SHA-256 of every file with the manifest. Pieces that the disk lost since they
        were verified are missing again afterwards.

        Raises `BadManifest` when every piece of a file is right and the file is not: then the
        manifest contradicts itself.
        """
        for number, file in enumerate(held.manifest.files):
            if await self.disk.sha256(f"{held.folder}/{file.name}") == file.sha256:
                continue
            lost = [i for i in held.span(number) if not await is_right(self.disk, held, i)]
            for index in lost:
                held.pieces[index] = 0
            if not lost:
                await self.withdraw(held.key)
                raise BadManifest(
                    f"{file.name!r} of checkpoint {held.key[0]}/{held.key[1]} has not the SHA-256 "
                    "its manifest states although every piece is right"
                )
            self._events.emit("shardcast.pieces_lost", file=file.name, pieces=len(lost))

    async def copy_known(self, held: Held) -> int:
        """Copy missing pieces that another checkpoint here has (files that did not change).

        Returns bytes copied.
        """
        copied = 0
        for index in held.missing():
            reference = held.manifest.pieces[index]
            blob = self.open(reference.digest)
            if blob is None:
                continue
            sink = self.sink(held, index)
            try:
                await self.disk.copy(blob.path, blob.offset, blob.size_bytes, sink)
                piece = sink.finish()
                if piece.size_bytes == reference.size_bytes and piece.verify(reference.digest):
                    await sink.commit(piece)
                    self.landed(held, index)
                    copied += piece.size_bytes
            finally:
                blob.release()
                sink.abandon()
            # Small pieces are copied in place: give other tasks a turn in between.
            await trio.lowlevel.checkpoint()
        return copied

    async def finish(self, held: Held) -> str:
        """Declare a checkpoint complete whose pieces are all present; returns its folder.

        Trims the store afterwards.
        """
        if not held.complete:
            if missing := held.missing():
                raise ValueError(f"checkpoint {held.key} lacks {len(missing)} pieces")
            held.complete = True
            if held.manifest.total_bytes >= CHECKPOINT_SYNC_BYTES:
                self.settler.add(held)
            self._notify(Change.COMPLETE, held)
        await self.trim()
        return held.folder

    async def discard(self, key: Key) -> None:
        """Remove a partial checkpoint, whether its manifest is known or not."""
        async with self._trimming:
            held = self._held.get(key)
            if held is None:
                await self._delete(self._name(key))
            elif not held.complete:
                await self._remove(held)

    async def withdraw(self, key: Key) -> None:
        """Remove a checkpoint that was never announced or must not be, complete or not."""
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
    ) -> tuple[Held, bytes]:
        """Make a folder on this disk a checkpoint: hash it (or believe `manifest`, if given), write
        its manifest, move it here; with `is_delta`, the delta that leads to (lineage, step).

        `folder` is gone afterwards; everything is durable before this returns. Returns the
        checkpoint and its manifest's digest. Publishing what is already here again returns that;
        other content under the same (lineage, step) raises `CheckpointConflict`.
        """
        key: Key = (lineage, step)
        if is_delta:
            key = delta_key(key)
        if manifest is None:
            manifest = await build(self.disk, folder, run=self.run, lineage=lineage, step=step)
        blob = manifest.encode()
        digest = digest_of(blob)
        known = self._held.get(key)
        if known is not None and known.complete:
            # Deltas and mirrors may differ: they are ways to the content.
            if (known.manifest.files, known.manifest.pieces) != (manifest.files, manifest.pieces):
                raise CheckpointConflict(
                    f"checkpoint {lineage}/{step} was published with other content; go on with "
                    "the next step, or open a new lineage"
                )
            await self.disk.remove(folder)
            return known, known.digest
        await self.discard(key)
        await self.disk.write(f"{folder}/{MANIFEST_NAME}", blob)
        await self.disk.sync(folder)
        if manifest.total_bytes >= CHECKPOINT_SYNC_BYTES:
            await self.disk.write(f"{folder}/{COMPLETE_NAME}", b"")
        final = self._name(key)
        await self.disk.rename(folder, final)
        await self.disk.sync(final)
        held = Held(manifest, digest, len(blob), final, complete=True, is_delta=is_delta)
        held.pieces = bytearray(b"\x01" * len(manifest.pieces))
        self.seeding.begin(held)
        self._remember(held)
        self._notify(Change.COMPLETE, held)
        await self.trim()
        return held, digest

    # --- starting ----------------------------------------------------------------------------

    async def recover(self) -> None:
        """Load the checkpoints on disk, as far as they hash right. Once, before anything else."""
        for name in (_SPARE_NAME, ENCODING_NAME):
            await self.disk.remove(f"{self.root}/{name}")
        for name in self.disk.list(self.root):
            path = f"{self.root}/{name}"
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
            self._remember(held)
            if not held.complete and not held.missing():
                await self.finish(held)
        await self.trim()
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
