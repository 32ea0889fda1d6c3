"""What was measured, on disk, so that a stopped measurement goes on where it stopped.

A submission's tokens and proofs are kept once, and what each validator found of them beside them.
So other thresholds, or another validator, need no generation.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import blake3
import msgspec
import numpy as np

from peers.calibration.work import HandedIn
from peers.proofs.toploc import ChunkResult
from peers.validator.recompute import Found
from swarm.version import __version__

_T = TypeVar("_T")


class _Found(msgspec.Struct, array_like=True):
    """`Found`, its arrays as little-endian float64."""

    chunks: list[ChunkResult]
    margins: bytes
    ties: list[list[bool]]


class Kept:
    """A folder of submissions and of what validators found of them.

    `basis` is everything that they depend on beside their names; another basis is another folder.
    """

    def __init__(self, folder: Path, *basis: object) -> None:
        digest = blake3.blake3(msgspec.msgpack.encode([__version__, *map(str, basis)]))
        self._folder = folder / digest.hexdigest()[:16]
        self._folder.mkdir(parents=True, exist_ok=True)

    def handed_in(self, worker: str, number: int, make: Callable[[], HandedIn]) -> HandedIn:
        """Submission `number` of a worker, made only if it is not kept."""
        return self._get(self._path(worker, number), HandedIn, make)

    def found(self, worker: str, validator: str, number: int, make: Callable[[], Found]) -> Found:
        """What a validator finds of a submission, computed only if it is not kept."""

        def packed() -> _Found:
            found = make()
            return _Found(found.chunks, found.margins.astype("<f8").tobytes(), found.ties)

        kept = self._get(self._path(worker, number, validator), _Found, packed)
        errors = np.array([each.error for each in kept.chunks])
        return Found(kept.chunks, errors, np.frombuffer(kept.margins, "<f8"), kept.ties)

    def _path(self, worker: str, number: int, validator: str = "") -> Path:
        name = f"{worker}, {number}" + (f", {validator}" if validator else "")
        return self._folder / f"{name.replace('/', '-')}.msgpack"

    def _get(self, path: Path, kind: type[_T], make: Callable[[], _T]) -> _T:
        try:
            return msgspec.msgpack.decode(path.read_bytes(), type=kind)
        except (FileNotFoundError, msgspec.MsgspecError):  # or cut off by a full disk
            made = make()
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.msgpack.encode(made))
        part.replace(path)
        return made
