"""A checkpoint as the store keeps it, the changes that watchers hear of, and the blobs on disk.

Recovery of checkpoints from disk at start: only pieces with the right hash are kept."""

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

import trio

from swarm.errors import DiskFullError
from swarm.shardcast.manifest import (
    HASHERS,
    MANIFEST_NAME,
    BadManifest,
    CheckpointManifest,
    digest_of,
    parse,
)
from swarm.transport import OpenBlob
from swarm.wire.messages import CheckpointReference
from swarm.world import Disk

Key = tuple[int, ...]
"""(lineage, step) of a checkpoint; later checkpoints supersede earlier ones. With a third element,
1, the delta that leads to that checkpoint; it is kept and served like a checkpoint."""


def delta_key(key: Key) -> Key:
    """The key of the delta that leads to a checkpoint."""
    return (key[0], key[1], 1)


class Change(Enum):
    """What happened to a checkpoint in the store."""

    BEGUN = "begun"
    """Its manifest has arrived."""
    PIECE = "piece"
    LEFT = "left"
    """A piece of a checkpoint published here is being sent for the first time."""
    COMPLETE = "complete"
    REMOVED = "removed"


Watcher = Callable[[Change, "Held", int], None]
"""Called at each change with the checkpoint and the piece's index (-1 if it is about no piece)."""


@dataclass(eq=False)
class Held:
    """A checkpoint on disk. All files of this package read it; only the store's parts write it."""

    manifest: CheckpointManifest
    digest: bytes
    """BLAKE3-256 of the manifest blob."""
    manifest_bytes: int
    folder: str
    """Path on this peer's disk."""
    complete: bool = False
    pieces: bytearray = field(init=False)
    """One byte per piece: 1 when it is verified and in its file."""
    unproven: set[int] = field(default_factory=set)
    """Files whose SHA-256 must still be checked, because pieces were made from deltas."""
    readers: int = 0
    """Number of its blobs being sent."""
    unsent: int = 0
    """Pieces of a checkpoint published here that were never sent: bit i is piece i."""
    is_delta: bool = False

    def __post_init__(self) -> None:
        self.pieces = bytearray([self.complete]) * len(self.manifest.pieces)

    @functools.cached_property
    def key(self) -> Key:
        key = (self.manifest.lineage, self.manifest.step)
        return delta_key(key) if self.is_delta else key

    @property
    def reference(self) -> CheckpointReference:
        """The reference by which this checkpoint is announced and fetched."""
        return CheckpointReference(
            lineage=self.manifest.lineage,
            step=self.manifest.step,
            digest=self.digest,
            size_bytes=self.manifest_bytes,
        )

    @property
    def base_key(self) -> Key | None:
        """The key of the checkpoint that this one adapts; None: it is no adapter."""
        base = self.manifest.base
        return None if base is None else (base.lineage, base.step)

    def missing(self, folders: Collection[str] = ()) -> list[int]:
        """Indices of pieces that have not arrived; with `folders`, of the files in these alone."""
        if self.complete:
            return []
        wanted = [is_in(file.name, folders) for file in self.manifest.files]
        pieces = enumerate(self.manifest.pieces)
        return [i for i, piece in pieces if not self.pieces[i] and wanted[piece.file]]

    def piece_path(self, index: int) -> str:
        return f"{self.folder}/{self.manifest.files[self.manifest.pieces[index].file].name}"


def is_in(name: str, folders: Collection[str]) -> bool:
    """Whether a file is in one of some folders of a checkpoint; none given: in any."""
    return not folders or name.rpartition("/")[0] in folders


class BlobIndex:
    """Pieces and manifests by digest.

    Checkpoints share pieces of an unchanged file, so a digest may have several positions:
    (checkpoint, piece index), with index -1 for the manifest."""

    def __init__(self) -> None:
        self._positions: dict[bytes, list[tuple[Held, int]]] = {}

    def add(self, held: Held) -> None:
        self._positions.setdefault(held.digest, []).append((held, -1))
        for index, piece in enumerate(held.manifest.pieces):
            self._positions.setdefault(piece.digest, []).append((held, index))

    def remove(self, held: Held) -> None:
        for digest in {held.digest, *(piece.digest for piece in held.manifest.pieces)}:
            rest = [position for position in self._positions.pop(digest) if position[0] is not held]
            if rest:
                self._positions[digest] = rest

    def of(self, digest: bytes) -> Sequence[tuple[Held, int]]:
        """Every position of a blob, present or missing."""
        return self._positions.get(digest, ())

    def named(self, digest: bytes) -> Held | None:
        return next((held for held, index in self.of(digest) if index < 0), None)

    def has(self, digest: bytes) -> bool:
        return any(index < 0 or held.pieces[index] for held, index in self.of(digest))

    def open(self, digest: bytes) -> OpenBlob | None:
        """Open a piece or manifest, if here; its checkpoint stays until the blob is released."""
        for held, index in self.of(digest):
            if index < 0:
                path, offset, size = f"{held.folder}/{MANIFEST_NAME}", 0, held.manifest_bytes
            elif held.complete or held.pieces[index]:
                piece = held.manifest.pieces[index]
                path, offset, size = held.piece_path(index), piece.offset, piece.size_bytes
            else:
                continue
            held.readers += 1
            return OpenBlob(path, offset, size, functools.partial(_release, held))
        return None


def _release(held: Held) -> None:
    held.readers -= 1


COMPLETE_NAME = ".complete"
"""Marks a folder that was fsynced completely: nothing in it needs to be hashed again."""


async def allocate(disk: Disk, held: Held, folders: Collection[str] = ()) -> None:
    """Preallocate the files of a checkpoint; raises `DiskFullError`."""
    for file in held.manifest.files:
        if is_in(file.name, folders):
            await disk.allocate(f"{held.folder}/{file.name}", file.size_bytes)


async def read_back(disk: Disk, run: str, path: str, key: Key) -> Held | None:
    """Read the checkpoint in a folder; None if its manifest is unusable or its files do not fit."""
    try:
        blob = await disk.read(f"{path}/{MANIFEST_NAME}")
        manifest = parse(blob)
    except (FileNotFoundError, BadManifest):
        return None
    if (manifest.run, manifest.lineage, manifest.step) != (run, *key[:2]):
        return None
    complete = disk.exists(f"{path}/{COMPLETE_NAME}") and all(
        disk.exists(f"{path}/{file.name}")
        and disk.size_bytes(f"{path}/{file.name}") == file.size_bytes
        for file in manifest.files
    )
    held = Held(manifest, digest_of(blob), len(blob), path, complete, is_delta=len(key) > 2)
    if not complete:
        await _hash_pieces(disk, held)
        if not any(held.pieces):
            try:
                await allocate(disk, held)
            except DiskFullError:
                # This peer stopped before it preallocated the files: there is only the manifest.
                return None
    return held


async def _hash_pieces(disk: Disk, held: Held) -> None:
    numbers = iter(range(len(held.pieces)))

    async def hash_some() -> None:
        for index in numbers:
            held.pieces[index] = await is_right(disk, held, index)

    async with trio.open_nursery() as nursery:
        for _ in range(HASHERS):
            nursery.start_soon(hash_some)


async def is_right(disk: Disk, held: Held, index: int) -> bool:
    """Whether a piece on disk hashes to its digest; of files nobody asked for there is nothing."""
    piece = held.manifest.pieces[index]
    if not disk.exists(held.piece_path(index)):
        return False
    found = await disk.digest(held.piece_path(index), piece.offset, piece.size_bytes)
    return found == piece.digest
