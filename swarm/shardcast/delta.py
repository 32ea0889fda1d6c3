"""Delta files: the words of a checkpoint that differ from the previous checkpoint.

After one optimiser step at the learning rates of reinforcement learning about 99 % of the bf16
weights are bit for bit unchanged (PULSE, 2026). A *delta file* holds, block by block, the positions
of the changed words and the differences of their raw bits. So base and delta give the next
checkpoint exactly, whatever its format: nothing is rounded, nothing is interpreted.

    magic, 8 bytes      length of the header, 4 bytes, little-endian as everything here
    header, msgpack     [block_bytes, [[name, size_bytes, word_bytes], …]]
    lengths             4 bytes each: the frame's, for every block of every file, in order; 0: equal
    frames              zstd, one per changed block

A block is `block_bytes` of a file (the last block may be shorter), an array of words of 1, 2, 4 or
8 bytes. Its frame holds:

- the number of changes n (4 bytes) and the number of wide gaps (4 bytes);
- n gaps of one byte: words skipped since the last change, 255 for a wide gap;
- the wide gaps, 4 bytes each;
- n differences of the words as integers, modulo their width and zigzag, in planes: first the lowest
  bytes of all, then the second bytes, and so on.

After a small step nearly all differences are ±1, so the planes above the lowest compress to
nothing.

This module needs numpy and runs in a child process (`DeltaService`); the network side is
`swarm.shardcast.chain`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import trio
import zstandard
from blake3 import blake3

from swarm.errors import DECODE_ERRORS, SwarmError
from swarm.shardcast import jobs
from swarm.shardcast.jobs import PieceToMake
from swarm.world.progress import checkpoint

DELTA_BLOCK_BYTES = 256 * 1024
"""Bytes compared, packed and changed at once: fits a core's cache, and divides every piece."""

MAGIC = b"swdelta1"
_HEADER_BYTES_MAX = 1 << 20
_SAFETENSORS_HEADER_BYTES_MAX = 100_000_000  # as the safetensors library allows
_WIDE = 255
"""The one-byte gap that marks a wide gap."""
_LEVEL = 1
"""Compression level of zstd. Higher ones take longer and gain under 2 %: the planes have few
patterns."""
_WORD_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
}
"""Word size by the dtype's name in safetensors; all other types are compared byte by byte."""
_UNSIGNED: dict[int, npt.DTypeLike] = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}

Words = npt.NDArray[Any]
"""A block as unsigned integers of its word size, shape [words]."""
Positions = npt.NDArray[np.int64]


class BadDelta(SwarmError):
    """A delta file is refused, or does not fit its base. The message says why in one sentence."""


class _File(msgspec.Struct, array_like=True, frozen=True):
    name: str
    size_bytes: int
    word_bytes: int

    def blocks(self, block_bytes: int) -> int:
        return -(-self.size_bytes // block_bytes)


class _Header(msgspec.Struct, array_like=True, frozen=True):
    block_bytes: int
    files: list[_File]


_decode_header = msgspec.msgpack.Decoder(_Header).decode


# --- one block -------------------------------------------------------------------------------


def changed_positions(old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8], word: int) -> Words:
    """Indices, in order, of the words of `word` bytes in which two equally long blocks differ.

    Whole 8-byte words are compared first: where few weights changed, that is most of the work.
    """
    whole = len(old) // 8 * 8
    old_wide, new_wide = old[:whole].view("<u8"), new[:whole].view("<u8")
    wide = np.flatnonzero(old_wide != new_wide)
    inner = np.flatnonzero((old_wide[wide] ^ new_wide[wide]).view(_UNSIGNED[word]) != 0)
    per_wide = 8 // word
    shift = per_wide.bit_length() - 1
    found: Words = wide[inner >> shift] << shift | inner & (per_wide - 1)
    if whole < len(old):
        rest = np.flatnonzero(
            old[whole:].view(_UNSIGNED[word]) != new[whole:].view(_UNSIGNED[word])
        )
        found = np.concatenate([found, rest + whole // word])
    return found


def encode_block(old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8], word: int) -> bytes:
    """Encode the changes from block `old` to `new`, uncompressed; empty when they are equal."""
    positions = changed_positions(old, new, word)
    if not len(positions):
        return b""
    gaps = positions.copy()
    gaps[1:] -= positions[:-1] + 1
    is_wide = gaps >= _WIDE
    wide = gaps[is_wide]
    gaps[is_wide] = _WIDE
    unsigned, bits = _UNSIGNED[word], 8 * word
    raised = new.view(unsigned)[positions] - old.view(unsigned)[positions]
    zigzag = (raised << 1) ^ np.negative(raised >> (bits - 1))
    return b"".join(
        (
            struct.pack("<II", len(positions), len(wide)),
            gaps.astype(np.uint8).tobytes(),
            wide.astype("<u4").tobytes(),
            *((zigzag >> place).astype(np.uint8).tobytes() for place in range(0, bits, 8)),
        )
    )


def apply_block(payload: bytes, block: npt.NDArray[np.uint8], word: int) -> None:
    """Apply encoded changes to `block` in place; raises `BadDelta` for a malformed payload."""
    unsigned = _UNSIGNED[word]
    words = block.view(unsigned)
    if len(payload) < 8:
        raise BadDelta("a block of the delta is cut short")
    count, wide_count = struct.unpack_from("<II", payload)
    if not 0 < count <= len(words) or len(payload) != 8 + count + 4 * wide_count + count * word:
        raise BadDelta(f"a block of the delta states {count} changes, which do not fit it")
    gaps = np.frombuffer(payload, np.uint8, count, 8)
    is_wide = np.flatnonzero(gaps == _WIDE)
    if len(is_wide) != wide_count:
        raise BadDelta("a block of the delta contradicts itself on its wide gaps")
    positions: Positions = gaps.astype(np.int64)
    wide = np.frombuffer(payload, "<u4", wide_count, 8 + count)
    if wide_count and np.count_nonzero(wide < _WIDE):
        raise BadDelta("a block of the delta states a narrow gap as a wide one")
    positions[is_wide] = wide
    positions[1:] += 1
    np.cumsum(positions, out=positions)
    if positions[-1] >= len(words):
        raise BadDelta("a block of the delta changes words behind its end")
    planes = np.frombuffer(payload, np.uint8, offset=8 + count + 4 * wide_count)
    zigzag = planes[:count].astype(unsigned)
    for place in range(1, word):
        plane = planes[place * count : (place + 1) * count]
        if plane.any():  # seldom: most words change by one
            zigzag |= plane.astype(unsigned) << 8 * place
    if np.count_nonzero(zigzag) != count:
        raise BadDelta("a block of the delta states a change by nothing")
    words[positions] += (zigzag >> 1) ^ np.negative(zigzag & 1)


# --- files -----------------------------------------------------------------------------------


def word_bytes_of(path: Path) -> int:
    """The word size in bytes for comparing a safetensors file; 0 for any other file.

    It is the narrowest word of its tensors, so that no word spans two of them. A wider value that
    changes then counts as several changes, which is as exact.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(size - 8, _SAFETENSORS_HEADER_BYTES_MAX):
            return 0
        raw = file.read(length)
    try:
        header = msgspec.json.decode(raw, type=dict[str, dict[str, Any]])
    except DECODE_ERRORS:
        return 0
    dtypes = [entry.get("dtype") for name, entry in header.items() if name != "__metadata__"]
    widths = [_WORD_BYTES.get(str(dtype), 1) for dtype in dtypes]
    return math.gcd(8, 8 + length, size, *widths)  # 8 and the sizes suffice without tensors


def _same_layout(base: Path, new: Path) -> bool:
    """Whether two safetensors files hold tensors of the same names, types, shapes and order."""
    if not base.is_file() or base.stat().st_size != new.stat().st_size:
        return False
    with base.open("rb") as old_file, new.open("rb") as new_file:
        length = old_file.read(8)
        if new_file.read(8) != length:
            return False
        size = int.from_bytes(length, "little")
        try:
            return bool(
                size <= _SAFETENSORS_HEADER_BYTES_MAX
                and _tensors(old_file.read(size)) == _tensors(new_file.read(size))
            )
        except ValueError:
            return False


def _tensors(header: bytes) -> Any:
    tensors = json.loads(header)
    tensors.pop("__metadata__", None)
    return tensors


@dataclass(frozen=True)
class Encoded:
    """Size and change counts of a delta that `encode` made."""

    size_bytes: int
    """Size of the delta file; 0 when it was given up and removed."""
    changed_words: int
    words: int
    """Words compared."""


def encode(base: Path, new: Path, out: Path, names: Sequence[str], *, limit_bytes: int) -> Encoded:
    """Write to `out`, durably, the delta from files `names` of folder `base` to those of `new`.

    Files that are no safetensors, or have other tensors than in the base, are left out: peers that
    apply the delta fetch them in full. The delta is given up, with `size_bytes` 0, if no file is
    left or it would exceed `limit_bytes`. Needs a few megabytes of memory.
    """
    block_bytes = DELTA_BLOCK_BYTES
    files = []
    for name in names:
        word = word_bytes_of(new / name) if (new / name).is_file() else 0
        if word and _same_layout(base / name, new / name):
            files.append(_File(name, (new / name).stat().st_size, word))
    if not files:
        return Encoded(0, 0, 0)
    header = msgspec.msgpack.encode(_Header(block_bytes, files))
    blocks = sum(file.blocks(block_bytes) for file in files)
    lengths = np.zeros(blocks, "<u4")
    table_at = len(MAGIC) + 4 + len(header)
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    done_bytes, changed, number = table_at + lengths.nbytes, 0, 0
    with out.open("wb") as target:
        target.seek(done_bytes)
        for file in files:
            with (
                (base / file.name).open("rb", buffering=0) as old_file,
                (new / file.name).open("rb", buffering=0) as source,
            ):
                for old, fresh in _pairs(old_file, source, block_bytes):
                    checkpoint()
                    payload = encode_block(old, fresh, file.word_bytes)
                    if payload:
                        changed += struct.unpack_from("<I", payload)[0]
                        frame = compressor.compress(payload)
                        lengths[number] = len(frame)
                        done_bytes += len(frame)
                        if done_bytes > limit_bytes:
                            break
                        target.write(frame)
                    number += 1
        if done_bytes <= limit_bytes:
            target.seek(0)
            target.write(MAGIC + struct.pack("<I", len(header)) + header + lengths.tobytes())
            target.flush()
            os.fsync(target.fileno())
    words = sum(file.size_bytes // file.word_bytes for file in files)
    if done_bytes > limit_bytes:
        out.unlink()
        return Encoded(0, changed, words)
    return Encoded(done_bytes, changed, words)


def _pairs(
    old: FileIO, new: FileIO, block_bytes: int
) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
    """Blocks of two equally long files, in two buffers that each block reuses."""
    buffers = np.empty(block_bytes, np.uint8), np.empty(block_bytes, np.uint8)
    while count := _fill(old, buffers[0]):
        if _fill(new, buffers[1]) != count:
            raise BadDelta("a checkpoint changed while it was compared")
        yield buffers[0][:count], buffers[1][:count]


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _fill(file: FileIO, buffer: npt.NDArray[np.uint8]) -> int:
    """Read until the buffer is full or the file ends; returns the bytes read."""
    view, done = buffer.data, 0
    while done < len(view) and (count := file.readinto(view[done:]) or 0):
        done += count
    return done


class Delta:
    """A delta file opened for reading, in a `with` block."""

    def __init__(self, path: Path) -> None:
        """Open a delta file; raises `BadDelta`, and `OSError` when it cannot be read."""
        self._file = path.open("rb")
        try:
            self._read_header(path.stat().st_size)
        except BaseException:
            self._file.close()
            raise
        self._decompressor = zstandard.ZstdDecompressor()

    def _read_header(self, size_bytes: int) -> None:
        start = self._file.read(len(MAGIC) + 4)
        if not start.startswith(MAGIC) or len(start) < len(MAGIC) + 4:
            raise BadDelta("the delta does not begin as a delta does")
        length = int.from_bytes(start[len(MAGIC) :], "little")
        if length > min(_HEADER_BYTES_MAX, size_bytes):
            raise BadDelta(f"the delta's header claims {length} bytes")
        try:
            header = _decode_header(self._file.read(length))
        except DECODE_ERRORS as error:
            raise BadDelta(f"the delta's header cannot be decoded: {error}") from error
        self.block_bytes = header.block_bytes
        if self.block_bytes != DELTA_BLOCK_BYTES:
            raise BadDelta(f"the delta's blocks have {self.block_bytes} bytes")
        self.files: dict[str, _File] = {}
        self._first: dict[str, int] = {}
        blocks = 0
        for file in header.files:
            if file.word_bytes not in _UNSIGNED or file.size_bytes % file.word_bytes:
                raise BadDelta(f"the delta's words have {file.word_bytes} bytes")
            if file.size_bytes < 0 or file.name in self.files:
                raise BadDelta(f"the delta lists {file.name[:80]!r} wrongly")
            self.files[file.name] = file
            self._first[file.name] = blocks
            blocks += file.blocks(self.block_bytes)
        table_at = len(start) + length
        if table_at + 4 * blocks > size_bytes:
            raise BadDelta(f"the delta is too short for {blocks} blocks")
        self._lengths = np.frombuffer(self._file.read(4 * blocks), "<u4").astype(np.int64)
        self._offsets = np.cumsum(self._lengths) - self._lengths + table_at + 4 * blocks
        if table_at + 4 * blocks + int(self._lengths.sum()) != size_bytes:
            raise BadDelta("the delta's blocks do not add up to its size")

    def __enter__(self) -> Delta:
        return self

    def __exit__(self, *details: object) -> None:
        self._file.close()

    def change(self, name: str, number: int, block: npt.NDArray[np.uint8]) -> None:
        """Apply the changes of block `number` of a file to `block`, in place."""
        file = self.files[name]
        index = self._first[name] + number
        length = int(self._lengths[index])
        if not length:
            return
        frame = os.pread(self._file.fileno(), length, int(self._offsets[index]))
        most = 8 + len(block) // file.word_bytes * (5 + file.word_bytes)
        try:
            parameters = zstandard.get_frame_parameters(frame)
            if parameters.content_size > most:
                raise BadDelta(f"a block of the delta unpacks to {parameters.content_size} bytes")
            payload = self._decompressor.decompress(frame, max_output_size=most)
        except zstandard.ZstdError as error:
            raise BadDelta(f"a block of the delta cannot be unpacked: {error}") from error
        apply_block(payload, block, file.word_bytes)


class Chain:
    """Deltas that lead, one after the other, from a complete checkpoint to a later one.

    Opened in a `with` block.
    """

    def __init__(self, base: Path, target: Path, deltas: Sequence[Path]) -> None:
        """Open the deltas; raises `BadDelta`.

        `base` and `target` are checkpoint folders, `deltas` files, oldest first.
        """
        self._base, self._target = base, target
        with ExitStack() as stack:
            self._deltas = [stack.enter_context(Delta(path)) for path in deltas]
            self._stack = stack.pop_all()

    def __enter__(self) -> Chain:
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def covers(self, name: str) -> bool:
        """Whether the base and every delta of the chain have this file, all in the same size."""
        sizes = {delta.files[name].size_bytes for delta in self._deltas if name in delta.files}
        path = self._base / name
        return (
            all(name in delta.files for delta in self._deltas)
            and len(sizes) == 1
            and path.is_file()
            and path.stat().st_size == sizes.pop()
        )

    def make(self, pieces: Sequence[PieceToMake]) -> list[int]:
        """Make pieces, check them, and write the right ones to their offsets in the target.

        Returns the indices of the right ones. Memory: the largest piece and a few megabytes.
        """
        made = []
        buffer = np.empty(max((piece.size_bytes for piece in pieces), default=0), np.uint8)
        for name, some in itertools.groupby(pieces, key=lambda piece: piece.name):
            if not self.covers(name):
                continue
            with (
                (self._base / name).open("rb", buffering=0) as source,
                (self._target / name).open("r+b", buffering=0) as target,
            ):
                for piece in some:
                    data = buffer[: piece.size_bytes]
                    source.seek(piece.offset)
                    if _fill(source, data) != piece.size_bytes:
                        continue
                    self._change(piece, data)
                    if blake3(data.data).digest() == piece.digest:
                        _write(target.fileno(), data.data, piece.offset)
                        made.append(piece.index)
        return made

    def _change(self, piece: PieceToMake, data: npt.NDArray[np.uint8]) -> None:
        step = DELTA_BLOCK_BYTES
        for start in range(0, piece.size_bytes, step):
            checkpoint()
            part = data[start : start + step]
            for delta in self._deltas:
                delta.change(piece.name, (piece.offset + start) // step, part)


# --- the child -------------------------------------------------------------------------------


class DeltaService:
    """Implements `swarm.shardcast.jobs.DeltaService`."""

    async def encode(self, job: jobs.EncodeDelta) -> jobs.DeltaEncoded:
        """See `encode`."""
        return await trio.to_thread.run_sync(self._encode, job)

    async def make(self, job: jobs.MakePieces) -> jobs.PiecesMade:
        """See `Chain.make`."""
        return await trio.to_thread.run_sync(self._make, job)

    def _encode(self, job: jobs.EncodeDelta) -> jobs.DeltaEncoded:
        made = encode(
            Path(job.base), Path(job.new), Path(job.out), job.names, limit_bytes=job.limit_bytes
        )
        return jobs.DeltaEncoded(
            size_bytes=made.size_bytes, changed_words=made.changed_words, words=made.words
        )

    def _make(self, job: jobs.MakePieces) -> jobs.PiecesMade:
        with Chain(Path(job.base), Path(job.target), [Path(each) for each in job.deltas]) as chain:
            return jobs.PiecesMade(made=chain.make(job.pieces))


_SERVICE: type[jobs.DeltaService] = DeltaService
