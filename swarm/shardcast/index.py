"""Index of the blobs on disk: which checkpoints hold a digest."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from swarm.shardcast.held import Held
from swarm.shardcast.manifest import MANIFEST_NAME
from swarm.transport import OpenBlob


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
            rest = [position for position in self._positions[digest] if position[0] is not held]
            if rest:
                self._positions[digest] = rest
            else:
                del self._positions[digest]

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
