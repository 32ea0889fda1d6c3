"""Recovery of checkpoints from disk at start: only pieces with the right hash are kept."""

from __future__ import annotations

import trio

from swarm.errors import DiskFullError
from swarm.shardcast.held import Held, Key
from swarm.shardcast.manifest import HASHERS, MANIFEST_NAME, BadManifest, digest_of, parse
from swarm.world import Disk

COMPLETE_NAME = ".complete"
"""Marks a folder that was fsynced completely: nothing in it needs to be hashed again."""


async def allocate(disk: Disk, held: Held) -> None:
    """Preallocate every file of a checkpoint; raises `DiskFullError`."""
    for file in held.manifest.files:
        await disk.allocate(f"{held.folder}/{file.name}", file.size_bytes)


async def read_back(disk: Disk, run: str, path: str, key: Key) -> Held | None:
    """Read the checkpoint in a folder; None if its manifest is unusable or its files do not fit."""
    try:
        blob = await disk.read(f"{path}/{MANIFEST_NAME}")
        manifest = parse(blob)
    except (FileNotFoundError, BadManifest):
        return None
    if (manifest.run, manifest.lineage, manifest.step) != (run, *key[:2]):
        return None
    complete = disk.exists(f"{path}/{COMPLETE_NAME}") and all(
        disk.exists(f"{path}/{file.name}")
        and disk.size_bytes(f"{path}/{file.name}") == file.size_bytes
        for file in manifest.files
    )
    held = Held(manifest, digest_of(blob), len(blob), path, complete, is_delta=len(key) > 2)
    if not complete:
        try:
            await allocate(disk, held)
        except DiskFullError:
            # This peer stopped before it preallocated the files: only the manifest is on disk.
            return None
        await _hash_pieces(disk, held)
    return held


async def _hash_pieces(disk: Disk, held: Held) -> None:
    numbers = iter(range(len(held.pieces)))

    async def hash_some() -> None:
        for index in numbers:
            held.pieces[index] = await is_right(disk, held, index)

    async with trio.open_nursery() as nursery:
        for _ in range(HASHERS):
            nursery.start_soon(hash_some)


async def is_right(disk: Disk, held: Held, index: int) -> bool:
    """Whether a piece on disk hashes to its digest."""
    piece = held.manifest.pieces[index]
    found = await disk.digest(held.piece_path(index), piece.offset, piece.size_bytes)
    return found == piece.digest
