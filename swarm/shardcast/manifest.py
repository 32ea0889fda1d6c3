"""Checkpoint manifests: the files of a checkpoint, their pieces, and the hash of each.

A manifest is a blob of msgpack, fetched by its BLAKE3 hash like any piece; the trainer signs that
hash (`swarm.wire.messages.Checkpoint`). Its pieces are exactly the files cut every `piece_size`
bytes, in order, so none overlap or are missing. It may name deltas and mirrors."""

import re
import urllib.parse
from collections.abc import Iterator
from typing import Annotated
from weakref import WeakValueDictionary

import blake3
import msgspec
import trio
from msgspec import Meta

from swarm.errors import DECODE_ERRORS, SwarmError
from swarm.shardcast import limits
from swarm.wire.messages import CheckpointReference, Count, Digest
from swarm.world import Disk

CHECKPOINT_FILES_MAX = 4096

MANIFEST_NAME = ".manifest"
"""File name of the manifest in a checkpoint folder; no file of a checkpoint begins with a dot."""

BASE_NAME = ".base"
"""File in the folder of a checkpoint that is an adapter: the path from there to its base."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,127})?")
HASHERS = 4
"""Pieces and files hashed at once while a manifest is built, and at start."""


class BadManifest(SwarmError):
    """A checkpoint manifest is refused. The message says why in one sentence."""


class ManifestFile(msgspec.Struct, array_like=True, frozen=True):
    """One file of a checkpoint."""

    name: str
    """A plain name, or two separated by `/` (two levels); none begins with a dot."""
    size_bytes: Count
    sha256: Digest


class ManifestPiece(msgspec.Struct, array_like=True, frozen=True):
    """A range of one file, and the digest that names it on the network."""

    file: Count
    """Index into the manifest's files."""
    offset: Count
    size_bytes: Count
    digest: Digest
    """BLAKE3-256."""


class DeltaLink(msgspec.Struct, array_like=True, frozen=True):
    """A delta (`swarm.shardcast.delta`), published like a checkpoint with one file."""

    base_step: Count
    """Step of its base in this lineage; the delta leads to the chain's next checkpoint."""
    base: Digest
    """BLAKE3-256 of the base's manifest."""
    manifest: Digest
    """BLAKE3-256 of the delta's own manifest."""
    manifest_bytes: Annotated[int, Meta(ge=1, le=limits.CHECKPOINT_MANIFEST_BYTES_MAX)]
    total_bytes: Count


class CheckpointManifest(msgspec.Struct, array_like=True, frozen=True, kw_only=True, weakref=True):
    """Everything needed to fetch and check a checkpoint. New fields go last, with a default."""

    run: str
    lineage: Count
    step: Count
    piece_size: Count
    files: list[ManifestFile]
    pieces: list[ManifestPiece]
    deltas: list[DeltaLink] = []
    """Deltas that lead here, newest first: each one's result is the base of the entry before."""
    mirrors: list[str] = []
    """`http://` or `https://` roots that serve the pieces as `GET /blob/<hex digest>`."""
    base: CheckpointReference | None = None
    """Of an adapter, which is of no use without it: the older checkpoint that it adapts."""

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def encode(self) -> bytes:
        """The blob whose BLAKE3 hash the trainer signs."""
        return msgspec.msgpack.encode(self)


_decoder = msgspec.msgpack.Decoder(CheckpointManifest)
_parsed: WeakValueDictionary[bytes, CheckpointManifest] = WeakValueDictionary()
"""The manifests in use, by digest: all peers of a simulation share one, which has half a megabyte
and takes milliseconds to check."""


def digest_of(blob: bytes) -> bytes:
    """BLAKE3-256 of a manifest blob."""
    return blake3.blake3(blob).digest()


def piece_size_for(total_bytes: int) -> int:
    """The power of two nearest to `total_bytes` / 2048, within 256 KiB (small: 1 MiB) to 32 MiB."""
    if total_bytes < limits.SMALL_BYTES:
        return limits.SMALL_BYTES
    wanted = total_bytes // limits.PIECES_WANTED
    size = limits.PIECE_BYTES_MIN
    while size < limits.PIECE_BYTES_MAX and 2 * size - wanted < wanted - size:
        size *= 2
    return size


def cut(sizes: list[int], piece_size: int) -> Iterator[tuple[int, int, int]]:
    """(file index, offset, size in bytes) of every piece, in order; empty files have none."""
    for index, size in enumerate(sizes):
        for offset in range(0, size, piece_size):
            yield index, offset, min(piece_size, size - offset)


def parse(blob: bytes) -> CheckpointManifest:
    """Decode and check a manifest blob from an untrusted source; raises `BadManifest`."""
    if len(blob) > limits.CHECKPOINT_MANIFEST_BYTES_MAX:
        raise BadManifest(
            f"the checkpoint manifest has {len(blob)} bytes, more than the "
            f"{limits.CHECKPOINT_MANIFEST_BYTES_MAX} allowed"
        )
    digest = digest_of(blob)
    known = _parsed.get(digest)
    if known is not None:
        return known
    try:
        manifest = _decoder.decode(blob)
    except DECODE_ERRORS as error:
        raise BadManifest(f"the checkpoint manifest cannot be decoded: {error}") from error
    check(manifest)
    _parsed[digest] = manifest
    return manifest


def check(manifest: CheckpointManifest) -> None:
    """Raise `BadManifest` unless names are plain and pieces cover every file exactly once."""
    size = manifest.piece_size
    if not limits.PIECE_BYTES_MIN <= size <= limits.PIECE_BYTES_MAX or size & (size - 1):
        raise BadManifest(
            f"the piece size {size} is not a power of two from {limits.PIECE_BYTES_MIN} "
            f"to {limits.PIECE_BYTES_MAX}"
        )
    _check_files(manifest.files)
    # Count by division first: a claimed petabyte must not be cut into pieces here.
    count = sum(-(-file.size_bytes // size) for file in manifest.files)
    if count > limits.CHECKPOINT_PIECES_MAX:
        raise BadManifest(
            f"the files make {count} pieces, more than the {limits.CHECKPOINT_PIECES_MAX} allowed"
        )
    if count != len(manifest.pieces):
        raise BadManifest(
            f"the files make {count} pieces of {size} bytes, the manifest lists "
            f"{len(manifest.pieces)}"
        )
    sizes = [file.size_bytes for file in manifest.files]
    for number, (expected, piece) in enumerate(zip(cut(sizes, size), manifest.pieces, strict=True)):
        stated = (piece.file, piece.offset, piece.size_bytes)
        if stated != expected:
            raise BadManifest(
                f"piece {number} is stated at (file, offset, size) {stated} where {expected} "
                "is due, so pieces overlap or are missing"
            )
    _check_deltas(manifest)
    mirrors = manifest.mirrors
    if len(mirrors) > limits.MIRRORS_MAX:
        raise BadManifest(
            f"the manifest names {len(mirrors)} mirrors, more than the {limits.MIRRORS_MAX} allowed"
        )
    for mirror in mirrors:
        if not is_mirror(mirror):
            raise BadManifest(f"the mirror {mirror[:80]!r} is no http:// or https:// address")
    base = manifest.base
    if base is not None and (base.lineage, base.step) >= (manifest.lineage, manifest.step):
        raise BadManifest(f"the manifest names {base} as its base, which is not older")


def _check_deltas(manifest: CheckpointManifest) -> None:
    if len(manifest.deltas) > limits.DELTA_CHAIN_MAX:
        raise BadManifest(
            f"the manifest names {len(manifest.deltas)} deltas, more than the "
            f"{limits.DELTA_CHAIN_MAX} allowed"
        )
    step = manifest.step
    for link in manifest.deltas:
        if link.base_step >= step:
            raise BadManifest(
                f"the chain of deltas goes from step {step} to {link.base_step}, so it has a cycle "
                "or leads nowhere"
            )
        step = link.base_step
    digests = [digest for link in manifest.deltas for digest in (link.base, link.manifest)]
    if len(set(digests)) < len(digests):
        raise BadManifest("the chain of deltas names one manifest twice, so it has a cycle")


def is_mirror(address: str) -> bool:
    """Whether a mirror may have this address: HTTP or HTTPS, without user, query or fragment."""
    if not 1 <= len(address) <= 300 or not address.isascii() or not address.isprintable():
        return False
    try:
        parts = urllib.parse.urlsplit(address)
        port = parts.port
    except ValueError:
        return False
    plain = not (parts.query or parts.fragment or "@" in parts.netloc or " " in address)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and plain and port != 0


def _check_files(files: list[ManifestFile]) -> None:
    if not 1 <= len(files) <= CHECKPOINT_FILES_MAX:
        raise BadManifest(f"a checkpoint has 1 to {CHECKPOINT_FILES_MAX} files, not {len(files)}")
    # Compare without case: on some file systems `A` and `a` are the same file.
    names: set[str] = set()
    folders: set[str] = set()
    for file in files:
        if not _NAME.fullmatch(file.name):
            raise BadManifest(
                f"{file.name[:80]!r} is no plain file name (letters, digits, . _ -, at most two "
                "levels, no leading dot)"
            )
        name = file.name.casefold()
        if name in names:
            raise BadManifest(f"the file {file.name!r} is listed twice")
        names.add(name)
        if "/" in name:
            folders.add(name.split("/")[0])
    clash = sorted(names & folders)
    if clash:
        raise BadManifest(f"{clash[0]!r} is both a file and a folder")


def _file_names(disk: Disk, folder: str) -> list[str]:
    """Files in a folder, at most two levels deep; names with a leading dot are left out."""
    names = []
    for name in disk.list(folder):
        if name.startswith("."):
            continue
        inner = disk.list(f"{folder}/{name}")
        if inner:
            names += [f"{name}/{entry}" for entry in inner if not entry.startswith(".")]
        else:
            names.append(name)
    return names


async def build(
    disk: Disk, folder: str, *, run: str, lineage: int, step: int
) -> CheckpointManifest:
    """Hash a checkpoint folder: BLAKE3 of every piece, SHA-256 of every file, a few at once.

    `folder` is a path on `disk`; files with a leading dot are not part of the checkpoint.
    Raises `BadManifest` when the folder is empty or a name in it cannot be published."""
    names = _file_names(disk, folder)
    sizes = [disk.size_bytes(f"{folder}/{name}") for name in names]
    piece_size = piece_size_for(sum(sizes))
    ranges = list(cut(sizes, piece_size))
    checksums: list[bytes] = [b""] * len(names)
    digests: list[bytes] = [b""] * len(ranges)
    limit = trio.CapacityLimiter(HASHERS)

    async def hash_file(index: int) -> None:
        async with limit:
            checksums[index] = await disk.sha256(f"{folder}/{names[index]}")

    async def hash_pieces(numbers: Iterator[tuple[int, tuple[int, int, int]]]) -> None:
        for number, (file, offset, size) in numbers:
            async with limit:
                digests[number] = await disk.digest(f"{folder}/{names[file]}", offset, size)

    async with trio.open_nursery() as nursery:
        for index in range(len(names)):
            nursery.start_soon(hash_file, index)
        numbered = iter(enumerate(ranges))
        for _ in range(HASHERS):
            nursery.start_soon(hash_pieces, numbered)
    manifest = CheckpointManifest(
        run=run,
        lineage=lineage,
        step=step,
        piece_size=piece_size,
        files=[
            ManifestFile(name, size, checksum)
            for name, size, checksum in zip(names, sizes, checksums, strict=True)
        ],
        pieces=[
            ManifestPiece(file, offset, size, digest)
            for (file, offset, size), digest in zip(ranges, digests, strict=True)
        ],
    )
    check(manifest)
    return manifest
