"""The newest snapshot, as JSON for all pages: they ask for it every few seconds."""

from __future__ import annotations

import gzip

import msgspec

from swarm.look.dashboard.snapshot import Snapshot

GZIP_LEVEL = 1
"""1,000 peers: 486 kB become 84 kB in 3.5 ms, and 78 kB in 6.4 ms at level 6."""


class Feed:
    """The newest snapshot, encoded and compressed once for all pages that ask."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.version = 0
        self.snapshot = snapshot
        self._encoded = b""
        self._packed = b""

    def publish(self, snapshot: Snapshot) -> None:
        """Replace the snapshot; one with the same content is no newer version."""
        if snapshot != self.snapshot:
            self.version += 1
            self.snapshot = snapshot
            self._encoded = self._packed = b""

    def encoded(self) -> bytes:
        """The snapshot as JSON, of which all clients that take it share one copy."""
        self._encoded = self._encoded or msgspec.json.encode(self.snapshot)
        return self._encoded

    def packed(self) -> bytes:
        """The same, compressed by gzip."""
        self._packed = self._packed or gzip.compress(self.encoded(), GZIP_LEVEL, mtime=0)
        return self._packed
