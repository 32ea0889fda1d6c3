"""A checkpoint as the store keeps it, the changes that watchers hear of, and the blobs on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from swarm.shardcast.manifest import MANIFEST_NAME, CheckpointManifest
from swarm.transport import OpenBlob
from swarm.wire.messages import CheckpointReference

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
    from_deltas: bool = False
    """Whether pieces were made from deltas: then the SHA-256 of its files must be checked."""
    readers: int = 0
    """Number of its blobs being sent."""
    unsent: int = 0
    """Pieces of a checkpoint published here that were never sent: bit i is piece i."""
    is_delta: bool = False

    def __post_init__(self) -> None:
        self.pieces = bytearray([self.complete]) * len(self.manifest.pieces)

    @property
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

    def missing(self) -> list[int]:
        """Indices of pieces that have not arrived."""
        return [] if self.complete else [i for i, there in enumerate(self.pieces) if not there]

    def piece_path(self, index: int) -> str:
        return f"{self.folder}/{self.manifest.files[self.manifest.pieces[index].file].name}"


class BlobIndex:
    """Pieces and manifests by digest.

    Checkpoints share pieces of an unchanged file, so a digest may have several positions:
    (checkpoint, piece index), with index -1 for the manifest.
    """

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
        """The checkpoint whose manifest has this digest."""
        return next((held for held, index in self.of(digest) if index < 0), None)

    def has(self, digest: bytes) -> bool:
        """Whether a piece or manifest is present."""
        return any(index < 0 or held.pieces[index] for held, index in self.of(digest))

    def open(self, digest: bytes) -> OpenBlob | None:
        """Open a piece or manifest to send; None if it is missing.

        Until the blob is released, its checkpoint is not removed.
        """
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
