"""Super-seeding: each piece of a large checkpoint is sent once before any is sent twice."""

from __future__ import annotations

from collections.abc import Callable

from swarm.shardcast.held import Change, Held, Key
from swarm.shardcast.index import BlobIndex

SEEDING_BYTES_MIN = 256 * 1024 * 1024
"""Size from which a published checkpoint is super-seeded; a smaller one reaches every peer before
that matters."""


class Seeding:
    """The checkpoints published here of which some pieces were never sent."""

    def __init__(self, index: BlobIndex, notify: Callable[[Change, Held, int], None]) -> None:
        self._index = index
        self._notify = notify
        self._keys: dict[Key, None] = {}

    @property
    def active(self) -> bool:
        """Whether some checkpoint published here has pieces that were never sent."""
        return bool(self._keys)

    def begin(self, held: Held) -> None:
        """Super-seed a checkpoint just published, if it is large enough."""
        if held.manifest.total_bytes >= SEEDING_BYTES_MIN:
            held.unsent = (1 << len(held.manifest.pieces)) - 1
            self._keys[held.key] = None

    def forget(self, key: Key) -> None:
        self._keys.pop(key, None)

    def leave(self, digest: bytes) -> bool:
        """Note a request for a blob. False if it is a piece that was sent already while other
        pieces of its checkpoint were not."""
        may = True
        for held, index in self._index.of(digest):
            if held.unsent and index >= 0:
                bit = 1 << index
                may = bool(held.unsent & bit)
                if may:
                    held.unsent ^= bit
                    self._left(held, index)
                    return True
        return may

    def end(self, digest: bytes) -> None:
        """End super-seeding of the checkpoint that this piece or manifest belongs to."""
        for held, index in self._index.of(digest):
            if held.unsent:
                held.unsent = 0
                self._left(held, index)

    def _left(self, held: Held, index: int) -> None:
        if not held.unsent:
            self.forget(held.key)
        self._notify(Change.LEFT, held, index)
