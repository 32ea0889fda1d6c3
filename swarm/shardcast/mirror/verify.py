"""Comparison of a folder with its manifest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from swarm.shardcast.manifest import ManifestFile, ManifestPiece, parse
from swarm.shardcast.mirror.index import Progress
from swarm.world.disk import LocalDisk


async def verify(
    folder: Path, blob: bytes, progress: Progress = lambda done, total: None
) -> list[str]:
    """Compare a folder with its manifest; returns one line per wrong file, none if all are right.

    Raises `BadManifest`.
    """
    manifest = parse(blob)
    disk = LocalDisk(folder)
    problems: list[str] = []
    done = 0
    pieces: list[list[ManifestPiece]] = [[] for _ in manifest.files]
    for piece in manifest.pieces:
        pieces[piece.file].append(piece)
    for file, its_pieces in zip(manifest.files, pieces, strict=True):
        try:
            report = functools.partial(_report, progress, done, manifest.total_bytes)
            problem = await _verify_file(disk, file, its_pieces, report)
        except OSError as error:
            problem = f"{file.name} cannot be read ({error.strerror})"
        if problem is not None:
            problems.append(problem)
        done += file.size_bytes
        progress(done, manifest.total_bytes)
    return problems


def _report(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)


async def _verify_file(
    disk: LocalDisk,
    file: ManifestFile,
    pieces: Sequence[ManifestPiece],
    report: Callable[[int], None],
) -> str | None:
    """The problem with one file, or None; may raise `OSError`."""
    if not disk.exists(file.name):
        return f"{file.name} is missing"
    if not disk.local_path(file.name).is_file():
        return f"{file.name} is no file"
    if (size := disk.size_bytes(file.name)) != file.size_bytes:
        return f"{file.name} has {size:,} bytes, not {file.size_bytes:,}"
    wrong = []
    for piece in pieces:
        if await disk.digest(file.name, piece.offset, piece.size_bytes) != piece.digest:
            wrong.append(piece.offset)
        report(piece.offset + piece.size_bytes)
    if wrong:
        return (
            f"{file.name} differs in {len(wrong)} of {len(pieces)} pieces, first at byte "
            f"{wrong[0]:,}"
        )
    if await disk.sha256(file.name) != file.sha256:
        return f"{file.name} has another SHA-256 than its pieces add up to"
    return None
