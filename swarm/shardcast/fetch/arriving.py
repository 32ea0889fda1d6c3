"""How the newest checkpoint comes to this peer, for its heartbeat."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from blake3 import blake3

from swarm.shardcast.fetch.job import Job
from swarm.shardcast.held import Key, delta_key
from swarm.shardcast.store import CheckpointStore
from swarm.wire.messages import SOURCE_BYTES, Arrival

SOURCES_SHOWN_MAX = 10_000

FETCHES_MAX = 16
"""Fetches of one checkpoint that are added up: deltas, and repetitions after a failure."""


def source_mark(name: str) -> bytes:
    """The short name of a source in a heartbeat."""
    return blake3(name.encode()).digest(length=SOURCE_BYTES)


@dataclass
class Arriving:
    """The newest checkpoint that was fetched, and who sent how much of it and of its deltas."""

    store: CheckpointStore
    _key: Key | None = None
    _received: deque[Counter[str]] = field(default_factory=lambda: deque(maxlen=FETCHES_MAX))
    """Bytes by source: of the checkpoint itself, and of each delta fetched for it."""

    def begin(self, job: Job, *, is_delta: bool) -> None:
        """Note a fetch that begins; one of an older checkpoint leaves everything as it is."""
        if is_delta:
            self._received.append(job.bytes_by_source)
        elif self._key is None or job.key >= self._key:
            if job.key != self._key:
                self._received.clear()
            self._key = job.key
            self._received.append(job.bytes_by_source)

    def arrival(self) -> Arrival | None:
        """The state of that checkpoint now; None if none was fetched."""
        if self._key is None:
            return None
        received = sum(self._received, Counter[str]())
        total = received.total()
        source, most = max(received.items(), key=lambda each: (each[1], each[0]), default=("", 0))
        return Arrival(
            policy=self._key[1],
            held=int(1000 * self._held_share(self._key)),
            source=source_mark(source) if source else b"",
            source_share=1000 * most // total if total else 0,
            sources=min(len(received), SOURCES_SHOWN_MAX),
        )

    def _held_share(self, key: Key) -> float:
        """The share of the pieces on the disk; while a delta comes in its place, of the delta."""
        found = self.store.held(key)
        if found is not None and found.complete:
            return 1.0
        shares = [
            sum(held.pieces) / max(1, len(held.pieces))
            for held in (found, self.store.held(delta_key(key)))
            if held is not None
        ]
        return max(shares, default=0.0)
