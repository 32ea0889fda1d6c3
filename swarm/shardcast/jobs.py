"""The jobs of the child process that encodes and applies deltas."""

from typing import ClassVar, Protocol

import msgspec

from swarm.wire.messages import Digest
from swarm.world import Job

PATIENCE_SECONDS = 120.0
"""Longest time without a progress report. Jobs report every block, which takes milliseconds, but a
disk may hang for a minute."""


class PieceToMake(msgspec.Struct, array_like=True, frozen=True):
    """A wanted piece of a checkpoint."""

    index: int
    name: str
    offset: int
    """Offset in the file; a multiple of the piece size."""
    size_bytes: int
    digest: Digest
    """BLAKE3-256; bytes with another hash are not written."""


class EncodeDelta(Job, frozen=True, kw_only=True):
    """Write the delta that turns files of folder `base` into those of `new`."""

    patience_seconds: ClassVar[float] = PATIENCE_SECONDS

    base: str
    new: str
    out: str
    names: list[str]
    limit_bytes: int
    """A larger delta is given up."""


class DeltaEncoded(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    """Size of the delta; 0 if it was given up."""
    changed_words: int
    words: int


class MakePieces(Job, frozen=True, kw_only=True):
    """Make pieces of a checkpoint from a complete one and a chain of deltas, oldest first."""

    patience_seconds: ClassVar[float] = PATIENCE_SECONDS

    base: str
    target: str
    deltas: list[str]
    pieces: list[PieceToMake]


class PiecesMade(msgspec.Struct, frozen=True, kw_only=True):
    made: list[int]
    """Indices of the pieces that came out right."""


class DeltaService(Protocol):
    """Encodes and applies deltas."""

    async def encode(self, job: EncodeDelta) -> DeltaEncoded: ...

    async def make(self, job: MakePieces) -> PiecesMade:
        """Make pieces; raises `BadDelta` for a delta that is malformed or of another base."""
