"""Which pieces of a published checkpoint have not left this peer yet (super-seeding).

Each piece of a large checkpoint leaves its publisher once before any leaves it twice.
"""

from __future__ import annotations

from collections.abc import Callable

from swarm.shardcast.held import Change, Held, Key
from swarm.shardcast.index import BlobIndex

SEEDING_BYTES_MIN = 256 * 1024 * 1024
"""Each piece of a checkpoint at least this large leaves its publisher once before any leaves it
twice; a smaller one is everywhere before that matters."""


class Seeding:
    """The checkpoints published here of which some pieces have not left."""

    def __init__(self, index: BlobIndex, notify: Callable[[Change, Held, int], None]) -> None:
        self._index = index
        self._notify = notify
        self._keys: dict[Key, None] = {}

    @property
    def active(self) -> bool:
        """Whether some checkpoint published here has pieces that have not left yet."""
        return bool(self._keys)

    def begin(self, held: Held) -> None:
        """Seed a checkpoint just published, if it is large enough."""
        if held.manifest.total_bytes >= SEEDING_BYTES_MIN:
            held.unsent = (1 << len(held.manifest.pieces)) - 1
            self._keys[held.key] = None

    def forget(self, key: Key) -> None:
        self._keys.pop(key, None)

    def leave(self, digest: bytes) -> bool:
        """Note a request for a blob. False when it is a piece that has left already while others of
        its checkpoint have not."""
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
        """Send any piece of the checkpoint of this piece or manifest from now on."""
        for held, index in self._index.of(digest):
            if held.unsent:
                held.unsent = 0
                self._left(held, index)

    def _left(self, held: Held, index: int) -> None:
        if not held.unsent:
            self.forget(held.key)
        self._notify(Change.LEFT, held, index)
