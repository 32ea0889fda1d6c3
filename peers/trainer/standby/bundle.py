"""Bundles: a training state encrypted for the run's standbys, file by file.

Each file is encrypted by XChaCha20-Poly1305 (libsodium's IETF construction) in chunks of 1 MiB. Its
key is a keyed hash of its content, so a file that has not changed is encrypted to the same bytes,
and its pieces are not sent again. Who gets a piece, even a relay, learns its size only. The secret
from which the keys follow is in the bundle's *contents*, sealed to each standby's own key.

A standby asks its trainer for one on `/swarm/standby/1.0.0`, framing SWARM: a request is one frame
`[lineage, step]`, the state that the standby has (-1, -1: none). The answer is one frame, an
`Offer`, once the trainer has a bundle of a newer state, or just the end after `ANSWER_SECONDS`. A
standby asks again at once. So a trainer makes bundles no faster than its standbys take them.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import msgspec
import trio
from blake3 import blake3
from msgspec import Meta
from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_decrypt as decrypt,
)
from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_encrypt as encrypt,
)
from nacl.exceptions import CryptoError

from swarm.errors import DECODE_ERRORS, DiskFullError, PeerError, SwarmError
from swarm.node.run_node import RunNode
from swarm.shardcast.limits import CHECKPOINT_PIECES_MAX, PIECE_BYTES_MAX
from swarm.shardcast.manifest import CHECKPOINT_FILES_MAX, piece_size_for
from swarm.transport import StreamError
from swarm.wire.identity import PeerId
from swarm.wire.messages import CheckpointReference, Count, Digest
from swarm.world import Disk

BUNDLE_VERSION = 1
CHUNK_BYTES = 1 << 20
TAG_BYTES = 16
FILES_MAX = CHECKPOINT_FILES_MAX
"""A bundle is published as a checkpoint is. A state has one file per rank, and one more."""

CONTENTS_BYTES_MAX = 1 << 20

PROTOCOL = "/swarm/standby/1.0.0"

ANSWER_SECONDS = 60.0
REACH_SECONDS = 15.0
FRAME_BYTES_MAX = CONTENTS_BYTES_MAX + 4096


class BadBundle(SwarmError):
    """A bundle cannot be used. The message says why in one sentence."""


class BundleFile(msgspec.Struct, array_like=True, frozen=True):
    """One file of a state."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\Z")]
    size_bytes: Count
    digest: Digest
    """BLAKE3-256 of the plain file."""


class Contents(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What a bundle holds. New fields go last, with a default."""

    version: int = BUNDLE_VERSION
    run: str
    lineage: Count
    step: Count
    saved_ms: Count
    """Wall time of the trainer when the bundle was made."""
    secret: Digest
    files: Annotated[list[BundleFile], Meta(max_length=FILES_MAX)]
    order: bytes = b""
    """The trainer's newest step order, as it stores it; empty: there is none."""


def parse_contents(raw: bytes) -> Contents:
    """Decode opened contents; raises `BadBundle`."""
    try:
        found = msgspec.msgpack.decode(raw, type=Contents)
    except DECODE_ERRORS as error:
        raise BadBundle(f"the contents of a bundle cannot be decoded: {error}") from error
    if found.version != BUNDLE_VERSION:
        raise BadBundle(
            f"a bundle has version {found.version}, and this program reads {BUNDLE_VERSION}; run "
            "the same version of Swarm on trainer and standby"
        )
    names = Counter(file.name for file in found.files)
    if twice := [name for name, count in names.items() if count > 1]:
        raise BadBundle(f"the contents of a bundle list {twice[0]} twice")
    return found


def file_name(index: int) -> str:
    """Name of an encrypted file in a bundle's folder."""
    return f"{index:04d}"


def sealed_sizes(contents: Contents) -> dict[str, int]:
    """Bytes of each encrypted file that these contents need, by name in the bundle's folder."""
    return {
        file_name(index): _sealed_bytes(file.size_bytes)
        for index, file in enumerate(contents.files)
    }


def _sealed_bytes(size_bytes: int) -> int:
    """Size of a file of `size_bytes` once it is encrypted."""
    return size_bytes + len(_starts(size_bytes)) * TAG_BYTES


def _starts(size_bytes: int) -> range:
    """Where the chunks of a file begin; an empty file has one."""
    return range(0, max(size_bytes, 1), CHUNK_BYTES)


async def encrypted(disk: Disk, folder: str, target: str, secret: bytes) -> list[BundleFile]:
    """Encrypt the files of `folder` into the empty folder `target`, and list them.

    Raises `OSError` if one is removed meanwhile. Before anything is written: `BadBundle` for more
    files or bytes than a bundle may have, and `DiskFullError` if the trainer's next state would
    find no room beside the bundle.
    """
    sizes = [disk.size_bytes(f"{folder}/{name}") for name in disk.list(folder)]
    _check_fits(folder, sizes)
    total = sum(sizes)
    if (free := disk.free_bytes()) < 2 * total:
        raise DiskFullError(
            f"a bundle of the {total:,} bytes in {folder} for the standbys, and room for the next "
            f"state, need {2 * total:,} bytes, and {free:,} are free; free some space, or choose "
            "a --home on a larger disk"
        )
    files: list[BundleFile] = []
    for name in disk.list(folder):
        path = f"{folder}/{name}"
        size = disk.size_bytes(path)
        file = BundleFile(name, size, await disk.digest(path, 0, size))
        out = f"{target}/{file_name(len(files))}"
        starts = _starts(size)
        await disk.allocate(out, _sealed_bytes(size))
        key = _key_of(file, secret)
        for number, start in enumerate(starts):
            plain = await disk.read(path, start, min(CHUNK_BYTES, size - start))
            sealed = encrypt(plain, _aad(file), _nonce(number), key)
            await _put(disk, out, start + number * TAG_BYTES, sealed)
        files.append(file)
    return files


def _check_fits(folder: str, sizes: list[int]) -> None:
    """Raise `BadBundle` if files of these sizes are too many, or too large, to be published."""
    if len(sizes) > FILES_MAX:
        raise BadBundle(
            f"the state in {folder} has {len(sizes):,} files, and a bundle for the standbys holds "
            f"at most {FILES_MAX:,}; train with fewer ranks, each of which writes one, or without "
            "standbys"
        )
    sealed = [_sealed_bytes(size) for size in sizes]
    piece = piece_size_for(sum(sealed))
    if sum(-(-size // piece) for size in sealed) > CHECKPOINT_PIECES_MAX:
        raise BadBundle(
            f"the state in {folder} has {sum(sizes):,} bytes in {len(sizes):,} files, and a bundle "
            f"for the standbys holds at most {CHECKPOINT_PIECES_MAX * PIECE_BYTES_MAX:,}, less one "
            "piece per file; train without standbys"
        )


async def decrypted(disk: Disk, folder: str, contents: Contents, target: str) -> None:
    """Decrypt a bundle into the empty folder `target`, durably; raises `BadBundle`."""
    for index, file in enumerate(contents.files):
        path, out = f"{folder}/{file_name(index)}", f"{target}/{file.name}"
        await disk.allocate(out, file.size_bytes)
        key = _key_of(file, contents.secret)
        for number, start in enumerate(_starts(file.size_bytes)):
            size = min(CHUNK_BYTES, file.size_bytes - start)
            sealed = await disk.read(path, start + number * TAG_BYTES, size + TAG_BYTES)
            try:
                plain = decrypt(sealed, _aad(file), _nonce(number), key)
            except (CryptoError, ValueError) as error:
                raise BadBundle(f"{file.name} of the bundle is damaged ({error})") from error
            if plain:
                await _put(disk, out, start, plain)
        if await disk.digest(out, 0, file.size_bytes) != file.digest:
            raise BadBundle(f"{file.name} of the bundle is not the file that was bundled")
    await disk.sync(target)


def _key_of(file: BundleFile, secret: bytes) -> bytes:
    """A key for this content alone, so that a nonce may be the number of a chunk."""
    return blake3(file.digest, key=secret).digest()


def _aad(file: BundleFile) -> bytes:
    return b"swarm/1/bundle" + file.size_bytes.to_bytes(8, "big")


def _nonce(chunk: int) -> bytes:
    return chunk.to_bytes(24, "big")


async def _put(disk: Disk, path: str, offset: int, data: bytes) -> None:
    sink = disk.sink(path, offset, len(data))
    try:
        sink.write(data)
        await sink.commit(sink.finish())
    finally:
        sink.abandon()


class Asked(msgspec.Struct, array_like=True, frozen=True):
    """The state that a standby has."""

    lineage: Annotated[int, Meta(ge=-1, le=2**53)]
    step: Annotated[int, Meta(ge=-1, le=2**53)]


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """A bundle, fetched as a checkpoint is: its pieces are named by their hashes."""

    reference: CheckpointReference
    total_bytes: Count
    sealed: Annotated[bytes, Meta(max_length=CONTENTS_BYTES_MAX)]
    """Its contents (`bundle.Contents`), sealed to this standby's key."""


async def ask(peer: RunNode, trainer: PeerId, asked: Asked) -> Offer | None:
    """Wait for a bundle that is newer than `asked`; None: there is none yet. Raises `PeerError`."""
    try:
        with trio.fail_after(REACH_SECONDS):
            await peer.node.reach(trainer)
            stream = await peer.node.transport.open_stream(trainer, PROTOCOL)
        try:
            with trio.fail_after(ANSWER_SECONDS + REACH_SECONDS):
                await stream.send(msgspec.msgpack.encode(asked))
                await stream.end()
                raw = await stream.receive()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await stream.reset()
        return None if raw is None else msgspec.msgpack.decode(raw, type=Offer)
    except trio.TooSlowError as error:
        raise PeerError(f"{trainer} did not answer in time") from error
    except StreamError as error:
        raise PeerError(f"{trainer} broke off ({error})") from error
    except DECODE_ERRORS as error:
        raise PeerError(f"{trainer} offered a malformed bundle: {error}") from error
