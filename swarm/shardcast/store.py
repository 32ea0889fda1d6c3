"""Checkpoints on this peer's disk: complete ones, and those still arriving.

    checkpoints/<lineage>-<step>/            the files in place, and `.manifest`
    checkpoints/<lineage>-<step>/.complete   nothing in this folder needs to be hashed again
    checkpoints/<lineage>-<step>.delta/      the same for the delta that leads to it
    checkpoints/<lineage>-<step>.removed/    being deleted
    checkpoints/.spare/                      pieces that are asked of several sources at once

Pieces are written into preallocated files under their final names and nothing is renamed when the
last one lands, so what is being sent never moves away. Which checkpoints are complete is asked of
the store, not read off the folders.

There is no journal. What is on disk is believed at start only where it hashes right: every piece
is hashed, and fetching goes on with the rest. So a *received* checkpoint below
`CHECKPOINT_SYNC_BYTES` is never fsynced; a power cut costs at most a fetch. A larger one is fsynced
in the background (`settle`) while it is in use already, then marked, and not hashed again: reading
hundreds of gigabytes at each start would cost more. What this peer *publishes* is always durable
before `publish` returns.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum

import trio

from swarm import defaults
from swarm.errors import DiskFullError, SwarmError
from swarm.events import Events
from swarm.shardcast.manifest import (
    MANIFEST_NAME,
    BadManifest,
    CheckpointManifest,
    build,
    digest_of,
    parse,
)
from swarm.transport import OpenBlob
from swarm.world import Disk, Sink

Key = tuple[int, ...]
"""(lineage, step): checkpoints in the order in which they supersede each other. With a third
element, 1: the delta that leads to that checkpoint, which is kept and served like one."""

_COMPLETE_NAME = ".complete"
_FOLDER = re.compile(r"(0|[1-9][0-9]{0,15})-(0|[1-9][0-9]{0,15})(\.delta)?")
_SPARE_NAME = ".spare"
ENCODING_NAME = ".encoding"
"""Where a delta is made before it is published."""
_HASHERS = 4
"""Pieces hashed at once at start."""


class CheckpointConflict(SwarmError):
    """Two different manifests claim the same (lineage, step)."""


def delta_key(key: Key) -> Key:
    """The key of the delta that leads to a checkpoint."""
    return (key[0], key[1], 1)


class Change(Enum):
    """What happened to a checkpoint in the store."""

    BEGUN = "begun"
    """Its manifest is here."""
    PIECE = "piece"
    LEFT = "left"
    """A piece of what was published here is being sent for the first time."""
    COMPLETE = "complete"
    REMOVED = "removed"


Watcher = Callable[[Change, "Held", int], None]
"""Called at once with the checkpoint and the piece's index (-1 for other changes)."""


@dataclass(eq=False)
class Held:
    """A checkpoint on disk. To be read by others; only the store writes it."""

    manifest: CheckpointManifest
    digest: bytes
    """BLAKE3-256 of the manifest blob."""
    manifest_bytes: int
    folder: str
    """Path on this peer's disk."""
    complete: bool = False
    pieces: bytearray = field(default_factory=bytearray)
    """One byte a piece: 1 when it is verified and in place."""
    from_deltas: bool = False
    """Whether pieces were made from deltas: then the SHA-256 of its files is to be checked."""
    readers: int = 0
    """Blobs being sent."""
    unsent: int = 0
    """Pieces of a checkpoint published here that have not left yet: bit i is piece i."""
    is_delta: bool = False

    @property
    def key(self) -> Key:
        key = (self.manifest.lineage, self.manifest.step)
        return delta_key(key) if self.is_delta else key

    def missing(self) -> list[int]:
        """Indices of pieces not yet here."""
        return [] if self.complete else [i for i, there in enumerate(self.pieces) if not there]

    @functools.cached_property
    def _firsts(self) -> list[int]:
        counts = [-(-f.size_bytes // self.manifest.piece_size) for f in self.manifest.files]
        return [0, *itertools.accumulate(counts)]

    def span(self, file: int) -> range:
        """Indices of the pieces of one file: consecutive, since files are cut in order."""
        return range(self._firsts[file], self._firsts[file + 1])

    def piece_path(self, index: int) -> str:
        return f"{self.folder}/{self.manifest.files[self.manifest.pieces[index].file].name}"


class CheckpointStore:
    """All checkpoints of one run on this peer. `recover()` first."""

    def __init__(
        self,
        disk: Disk,
        run: str,
        events: Events,
        *,
        keep: int = defaults.CHECKPOINTS_KEPT,
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
        # Where a digest is: (checkpoint, piece), piece -1 being the manifest itself. Checkpoints
        # share pieces when a file did not change, so there may be several places.
        self._places: dict[bytes, list[tuple[Held, int]]] = {}
        self._seeding: dict[Key, None] = {}
        self._pins: Counter[Key] = Counter()
        self._watchers: list[Watcher] = []
        self._trimming = trio.Lock()
        self._spares = 0
        self._unsettled: dict[Key, Held] = {}
        """Received, complete, and to be fsynced and marked."""
        self._to_settle = trio.Event()

    # --- reading -----------------------------------------------------------------------------

    def complete(self) -> list[Key]:
        """Complete checkpoints, oldest first."""
        return sorted(k for k, held in self._held.items() if held.complete and not held.is_delta)

    def held(self, key: Key) -> Held | None:
        """A checkpoint or delta whose manifest is here, complete or not."""
        return self._held.get(key)

    def named(self, digest: bytes) -> Held | None:
        """The checkpoint whose manifest has this digest."""
        return next((held for held, index in self._places.get(digest, ()) if index < 0), None)

    def all(self) -> list[Held]:
        """Every checkpoint and delta whose manifest is here, oldest first."""
        return [self._held[key] for key in sorted(self._held)]

    def knows(self, digest: bytes) -> bool:
        """Whether a manifest here names this blob, be it present or still missing."""
        return digest in self._places

    def has(self, digest: bytes) -> bool:
        """Whether a piece or manifest is here to be sent."""
        return any(index < 0 or held.pieces[index] for held, index in self._places.get(digest, ()))

    @property
    def seeding(self) -> bool:
        """Whether some checkpoint published here has pieces that have not left yet."""
        return bool(self._seeding)

    def leave(self, digest: bytes) -> bool:
        """Note that a blob is asked for. False when it is a piece of a checkpoint published here
        of which this piece has left already and others have not."""
        may = True
        for held, index in self._places.get(digest, ()):
            if held.unsent and index >= 0:
                bit = 1 << index
                may = bool(held.unsent & bit)
                if may:
                    held.unsent ^= bit
                    self._left(held, index)
                    return True
        return may

    def end_seeding(self, digest: bytes) -> None:
        """Send any piece of the checkpoint of this piece or manifest from now on."""
        for held, index in self._places.get(digest, ()):
            if held.unsent:
                held.unsent = 0
                self._left(held, index)

    def _left(self, held: Held, index: int) -> None:
        if not held.unsent:
            self._seeding.pop(held.key, None)
        self._tell(Change.LEFT, held, index)

    def open(self, digest: bytes) -> OpenBlob | None:
        """A piece or manifest to send, if it is present; the checkpoint stays until released."""
        for held, index in self._places.get(digest, ()):
            if index < 0:
                path, offset, size = f"{held.folder}/{MANIFEST_NAME}", 0, held.manifest_bytes
            elif held.complete or held.pieces[index]:
                piece = held.manifest.pieces[index]
                path, offset, size = held.piece_path(index), piece.offset, piece.size_bytes
            else:
                continue
            held.readers += 1
            return OpenBlob(path, offset, size, functools.partial(self._release, held))
        return None

    @staticmethod
    def _release(held: Held) -> None:
        held.readers -= 1

    def watch(self, watcher: Watcher) -> None:
        """Be told of every change, from now on."""
        self._watchers.append(watcher)

    def _tell(self, change: Change, held: Held, index: int = -1) -> None:
        for watcher in self._watchers:
            watcher(change, held, index)

    # --- keeping -----------------------------------------------------------------------------

    def pin(self, key: Key) -> None:
        """Keep a checkpoint (now, or once it is there) until as many `unpin`s."""
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
        """Remove what is in the store; under `_trimming`, so that nobody else does so meanwhile."""
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
        self._places.setdefault(held.digest, []).append((held, -1))
        for index, piece in enumerate(held.manifest.pieces):
            self._places.setdefault(piece.digest, []).append((held, index))
        self._tell(Change.BEGUN, held)

    def _forget(self, held: Held) -> None:
        del self._held[held.key]
        self._seeding.pop(held.key, None)
        self._unsettled.pop(held.key, None)
        for digest in {held.digest, *(piece.digest for piece in held.manifest.pieces)}:
            rest = [place for place in self._places[digest] if place[0] is not held]
            if rest:
                self._places[digest] = rest
            else:
                del self._places[digest]
        self._tell(Change.REMOVED, held)

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
            await self._allocate(held)
        except DiskFullError:
            await self._delete(folder)
            raise
        self._remember(held)
        return held

    async def _allocate(self, held: Held) -> None:
        for file in held.manifest.files:
            await self.disk.allocate(f"{held.folder}/{file.name}", file.size_bytes)

    async def _make_sure_of_room(self, new: Held) -> None:
        """Room for a new one, if need be in place of older ones that nobody uses, those first that
        are not complete: a peer with little disk keeps fewer. The newest complete one stays: it is
        the base of the next delta."""
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
        """Bytes for another checkpoint, and what they are."""
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
        """A file for a piece whose place somebody else is writing to; removed with the block.

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
        self._tell(Change.PIECE, held, index)

    async def check_files(self, held: Held) -> None:
        """Compare the SHA-256 of every file with the manifest. What the disk lost since it was
        verified is missing again afterwards.

        Raises `BadManifest` when every piece of a file is right and the file is not: then the
        manifest contradicts itself.
        """
        for number, file in enumerate(held.manifest.files):
            if await self.disk.sha256(f"{held.folder}/{file.name}") == file.sha256:
                continue
            lost = [i for i in held.span(number) if not await self._piece_is_right(held, i)]
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
            # Small pieces are copied in place: others have their turn in between.
            await trio.lowlevel.checkpoint()
        return copied

    async def finish(self, held: Held) -> str:
        """Declare a checkpoint complete whose pieces are all here; returns its folder.

        Trims the store afterwards.
        """
        if not held.complete:
            if missing := held.missing():
                raise ValueError(f"checkpoint {held.key} lacks {len(missing)} pieces")
            held.complete = True
            if held.manifest.total_bytes >= defaults.CHECKPOINT_SYNC_BYTES:
                self._unsettled[held.key] = held
                self._to_settle.set()
            self._tell(Change.COMPLETE, held)
        await self.trim()
        return held.folder

    async def keep_settling(self) -> None:
        """Settle what is received, until cancelled."""
        while True:
            await self._to_settle.wait()
            await self.settle()

    async def settle(self) -> None:
        """Make durable what was received, and mark it, so that no start hashes it again. A disk
        that fails here is an event: the next start then hashes."""
        self._to_settle = trio.Event()
        while self._unsettled:
            key, held = next(iter(self._unsettled.items()))
            self.pin(key)
            try:
                await self.disk.sync(held.folder)
                if key in self._unsettled:  # not withdrawn meanwhile
                    await self.disk.write(f"{held.folder}/{_COMPLETE_NAME}", b"")
            except (OSError, SwarmError) as error:
                self._events.emit("shardcast.not_synced", step=held.key[1], reason=str(error))
            finally:
                self.unpin(key)
                self._unsettled.pop(key, None)

    async def discard(self, key: Key) -> None:
        """Remove a partial checkpoint, whether its manifest is known or not."""
        async with self._trimming:
            held = self._held.get(key)
            if held is None:
                await self._delete(self._name(key))
            elif not held.complete:
                await self._remove(held)

    async def withdraw(self, key: Key) -> None:
        """Remove one that nobody was told of or should have, complete or not."""
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
        if manifest.total_bytes >= defaults.CHECKPOINT_SYNC_BYTES:
            await self.disk.write(f"{folder}/{_COMPLETE_NAME}", b"")
        final = self._name(key)
        await self.disk.rename(folder, final)
        await self.disk.sync(final)
        held = Held(manifest, digest, len(blob), final, complete=True, is_delta=is_delta)
        held.pieces = bytearray(b"\x01" * len(manifest.pieces))
        if manifest.total_bytes >= defaults.SEEDING_BYTES_MIN:
            held.unsent = (1 << len(manifest.pieces)) - 1
            self._seeding[key] = None
        self._remember(held)
        self._tell(Change.COMPLETE, held)
        await self.trim()
        return held, digest

    # --- starting ----------------------------------------------------------------------------

    async def recover(self) -> None:
        """Find what is on disk, believing only what hashes right. Once, before anything else."""
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
            held = await self._read_back(path, delta_key(key) if match[3] else key)
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

    async def _read_back(self, path: str, key: Key) -> Held | None:
        """A checkpoint folder as it is on disk; None when it is not worth keeping."""
        try:
            blob = await self.disk.read(f"{path}/{MANIFEST_NAME}")
            manifest = parse(blob)
        except (FileNotFoundError, BadManifest):
            return None
        if (manifest.run, manifest.lineage, manifest.step) != (self.run, *key[:2]):
            return None
        held = Held(manifest, digest_of(blob), len(blob), path, is_delta=len(key) > 2)
        if self.disk.exists(f"{path}/{_COMPLETE_NAME}") and all(
            self.disk.exists(f"{path}/{file.name}")
            and self.disk.size_bytes(f"{path}/{file.name}") == file.size_bytes
            for file in manifest.files
        ):
            held.pieces = bytearray(b"\x01" * len(manifest.pieces))
            held.complete = True
            return held
        held.pieces = bytearray(len(manifest.pieces))
        try:
            await self._allocate(held)
        except DiskFullError:
            # Stopped before there was room for its files: but for its manifest it is empty.
            return None
        await self._hash_pieces(held)
        return held

    async def _hash_pieces(self, held: Held) -> None:
        numbers = iter(range(len(held.pieces)))

        async def hash_some() -> None:
            for index in numbers:
                held.pieces[index] = await self._piece_is_right(held, index)

        async with trio.open_nursery() as nursery:
            for _ in range(_HASHERS):
                nursery.start_soon(hash_some)

    async def _piece_is_right(self, held: Held, index: int) -> bool:
        piece = held.manifest.pieces[index]
        found = await self.disk.digest(held.piece_path(index), piece.offset, piece.size_bytes)
        return found == piece.digest
