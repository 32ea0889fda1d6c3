"""The index of a mirror, `checkpoint.json`: which checkpoint it has."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from swarm.errors import UserError
from swarm.shardcast import limits
from swarm.shardcast.manifest import CheckpointManifest, digest_of
from swarm.wire.messages import Checkpoint, CheckpointReference, Count

INDEX = "checkpoint.json"
RUN_CHARACTERS_MAX = 200
"""Longest run id in a mirror's index: it is shown on terminals."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `checkpoint.json`."""

    run: str
    lineage: Count
    step: Count
    manifest: str
    """BLAKE3-256 of the manifest, in hexadecimal."""
    manifest_bytes: int
    total_bytes: Count

    def checkpoint(self) -> Checkpoint:
        """The message with which a trainer would announce this checkpoint; raises `UserError`."""
        try:
            digest = bytes.fromhex(self.manifest)
        except ValueError:
            digest = b""
        if len(digest) != 32 or not 1 <= self.manifest_bytes <= (
            limits.CHECKPOINT_MANIFEST_BYTES_MAX
        ):
            raise UserError(f"the mirror's {INDEX} names no manifest: {self.manifest[:80]!r}")
        if not is_run(self.run):
            raise UserError(f"the mirror's {INDEX} names no run: {self.run[:80]!r}")
        return Checkpoint(
            reference=CheckpointReference(
                lineage=self.lineage, step=self.step, digest=digest, size_bytes=self.manifest_bytes
            ),
            total_bytes=self.total_bytes,
        )


def is_run(text: str) -> bool:
    """Whether a text may be a run's id: printable, since it is shown on terminals."""
    return 1 <= len(text) <= RUN_CHARACTERS_MAX and text.isprintable()


def index_of(manifest: CheckpointManifest, blob: bytes) -> Index:
    return Index(
        run=manifest.run,
        lineage=manifest.lineage,
        step=manifest.step,
        manifest=digest_of(blob).hex(),
        manifest_bytes=len(blob),
        total_bytes=manifest.total_bytes,
    )
