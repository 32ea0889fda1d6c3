"""Delta files: the words of a checkpoint that differ from the previous checkpoint (decision 16).

A *delta file* holds, block by block, the positions of the changed words and the differences of
their raw bits (docs/protocol/deltas.md: the format), so nothing is rounded or interpreted. After a
small step nearly all differences are ±1, so the planes above the lowest compress to nothing.

This module needs numpy and runs in a child process (`DeltaService`); the network side is
`swarm.shardcast.chain`."""

import itertools
import math
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from io import BufferedReader
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
from swarm.shardcast.jobs import DeltaEncoded, PieceToMake
from swarm.world.progress import checkpoint

DELTA_BLOCK_BYTES = 256 * 1024
"""Bytes compared, packed and changed at once: fits a core's cache, and divides every piece."""

MAGIC = b"swdelta1"
_HEADER_BYTES_MAX = 1 << 20
_SAFETENSORS_HEADER_BYTES_MAX = 100_000_000  # as the safetensors library allows
_WIDE = 255
"""The one-byte gap that marks a wide gap."""
_LEVEL = 1
"""Compression level of zstd. Higher ones are slower and gain under 2 %: few patterns."""
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

    @property
    def blocks(self) -> int:
        return -(-self.size_bytes // DELTA_BLOCK_BYTES)


class _Header(msgspec.Struct, array_like=True, frozen=True):
    block_bytes: int
    files: list[_File]


_decode_header = msgspec.msgpack.Decoder(_Header).decode


# --- one block -------------------------------------------------------------------------------


def changed_positions(old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8], word: int) -> Words:
    """Indices, in order, of the words of `word` bytes in which two equally long blocks differ.

    Whole 8-byte words are compared first: where few weights changed, that is most of the work."""
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
    # Differences are modulo 2^bits. Their top bit is the sign, which zigzag moves to the lowest
    # one, so that −1 has no high bytes either.
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
    # They only grow, and their sum is far below 2⁶³, so the last one speaks for all. No word comes
    # twice: numpy's `+=` below would add only one of its changes.
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


def _layout(path: Path) -> tuple[int, int, dict[str, Any]] | None:
    """Sizes of a safetensors file and its header, and the tensors by name; None for other files."""
    if not path.is_file():
        return None
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(size - 8, _SAFETENSORS_HEADER_BYTES_MAX):
            return None
        raw = file.read(length)
    try:
        tensors = msgspec.json.decode(raw, type=dict[str, dict[str, Any]])
    except DECODE_ERRORS:
        return None
    tensors.pop("__metadata__", None)
    return size, length, tensors


def word_bytes_of(path: Path) -> int:
    """The word size in bytes for comparing a safetensors file; 0 for any other file.

    It is the narrowest word of its tensors, so that no word spans two of them. A wider value that
    changes then counts as several changes, which is as exact."""
    layout = _layout(path)
    if layout is None:
        return 0
    size, length, tensors = layout
    widths = [_WORD_BYTES.get(str(tensor.get("dtype")), 1) for tensor in tensors.values()]
    return math.gcd(8, 8 + length, size, *widths)  # 8 and the sizes suffice without tensors


def encode(
    base: Path, new: Path, out: Path, names: Sequence[str], *, limit_bytes: int
) -> DeltaEncoded:
    """Write to `out`, durably, the delta from files `names` of folder `base` to those of `new`.

    Files that are no safetensors, or have other tensors than in the base, are left out: peers that
    apply the delta fetch them in full. The delta is given up, with `size_bytes` 0, if no file is
    left or it would exceed `limit_bytes`. Needs a few megabytes of memory."""
    files = []
    for name in names:
        word = word_bytes_of(new / name)
        if word and _layout(base / name) == _layout(new / name):
            files.append(_File(name, (new / name).stat().st_size, word))
    if not files:
        return DeltaEncoded(size_bytes=0, changed_words=0, words=0)
    header = msgspec.msgpack.encode(_Header(DELTA_BLOCK_BYTES, files))
    lengths = np.zeros(sum(file.blocks for file in files), "<u4")
    table_at = len(MAGIC) + 4 + len(header)
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    done_bytes, changed = table_at + lengths.nbytes, 0
    with out.open("wb") as target:
        target.seek(done_bytes)
        for number, (old, fresh, word) in enumerate(_pairs(base, new, files)):
            checkpoint()
            payload = encode_block(old, fresh, word)
            if payload:
                changed += struct.unpack_from("<I", payload)[0]
                frame = compressor.compress(payload)
                lengths[number] = len(frame)
                done_bytes += len(frame)
                if done_bytes > limit_bytes:
                    break
                target.write(frame)
        else:
            target.seek(0)
            target.write(MAGIC + struct.pack("<I", len(header)) + header + lengths.tobytes())
            target.flush()
            os.fsync(target.fileno())
    words = sum(file.size_bytes // file.word_bytes for file in files)
    if done_bytes > limit_bytes:
        out.unlink()
        done_bytes = 0
    return DeltaEncoded(size_bytes=done_bytes, changed_words=changed, words=words)


def _pairs(
    base: Path, new: Path, files: Sequence[_File]
) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], int]]:
    """The blocks of files that are equally long in two folders, and the word size of each pair, in
    two buffers that each pair reuses."""
    buffers = np.empty(DELTA_BLOCK_BYTES, np.uint8), np.empty(DELTA_BLOCK_BYTES, np.uint8)
    for file in files:
        with (base / file.name).open("rb") as before, (new / file.name).open("rb") as after:
            while count := before.readinto(buffers[0].data):
                if after.readinto(buffers[1].data) != count:
                    raise BadDelta("a checkpoint changed while it was compared")
                yield buffers[0][:count], buffers[1][:count], file.word_bytes


class Delta:
    """A delta file opened for reading."""

    def __init__(self, file: BufferedReader) -> None:
        """Read the header; raises `BadDelta`."""
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor()
        size_bytes = os.fstat(file.fileno()).st_size
        start = file.read(len(MAGIC) + 4)
        if not start.startswith(MAGIC) or len(start) < len(MAGIC) + 4:
            raise BadDelta("the delta does not begin as a delta does")
        length = int.from_bytes(start[len(MAGIC) :], "little")
        if length > min(_HEADER_BYTES_MAX, size_bytes):
            raise BadDelta(f"the delta's header claims {length} bytes")
        try:
            header = _decode_header(file.read(length))
        except DECODE_ERRORS as error:
            raise BadDelta(f"the delta's header cannot be decoded: {error}") from error
        if header.block_bytes != DELTA_BLOCK_BYTES:
            raise BadDelta(f"the delta's blocks have {header.block_bytes} bytes")
        self.files: dict[str, _File] = {}
        self._first: dict[str, int] = {}
        blocks = 0
        for each in header.files:
            if each.word_bytes not in _UNSIGNED or each.size_bytes % each.word_bytes:
                raise BadDelta(f"the delta's words have {each.word_bytes} bytes")
            if each.size_bytes < 0 or each.name in self.files:
                raise BadDelta(f"the delta lists {each.name[:80]!r} wrongly")
            self.files[each.name] = each
            self._first[each.name] = blocks
            blocks += each.blocks
        frames_at = len(start) + length + 4 * blocks
        if frames_at > size_bytes:
            raise BadDelta(f"the delta is too short for {blocks} blocks")
        self._lengths = np.frombuffer(file.read(4 * blocks), "<u4").astype(np.int64)
        self._offsets = np.cumsum(self._lengths) - self._lengths + frames_at
        if frames_at + int(self._lengths.sum()) != size_bytes:
            raise BadDelta("the delta's blocks do not add up to its size")

    def change(self, name: str, number: int, block: npt.NDArray[np.uint8]) -> None:
        """Apply the changes of block `number` of a file to `block`, in place."""
        file = self.files[name]
        index = self._first[name] + number
        length = int(self._lengths[index])
        if not length:
            return
        frame = os.pread(self._file.fileno(), length, int(self._offsets[index]))
        # The longest payload: each word changed, after a wide gap. The frame's own word is checked
        # first, since zstd then allocates what it says whatever `max_output_size` is. A frame that
        # does not say counts as 2⁶⁴ − 1 bytes.
        most = 8 + len(block) // file.word_bytes * (5 + file.word_bytes)
        try:
            parameters = zstandard.get_frame_parameters(frame)
            if parameters.content_size > most:
                raise BadDelta(f"a block of the delta unpacks to {parameters.content_size} bytes")
            payload = self._decompressor.decompress(frame, max_output_size=most)
        except zstandard.ZstdError as error:
            raise BadDelta(f"a block of the delta cannot be unpacked: {error}") from error
        apply_block(payload, block, file.word_bytes)


def make(
    base: Path, target: Path, deltas: Sequence[Path], pieces: Sequence[PieceToMake]
) -> list[int]:
    """Make pieces, check them, and write the right ones to their offsets in `target`.

    `base` and `target` are checkpoint folders; `deltas` are files that lead from one to the other,
    oldest first. Returns the indices of the right pieces; raises `BadDelta`. Memory: the largest
    piece and a few megabytes."""
    made = []
    buffer = np.empty(max((piece.size_bytes for piece in pieces), default=0), np.uint8)
    with ExitStack() as stack:
        chain = [Delta(stack.enter_context(path.open("rb"))) for path in deltas]
        for name, some in itertools.groupby(pieces, key=lambda piece: piece.name):
            if not _cover(chain, base, name):
                continue
            with (base / name).open("rb") as source, (target / name).open("r+b") as file:
                for piece in some:
                    data = buffer[: piece.size_bytes]
                    source.seek(piece.offset)
                    if source.readinto(data.data) != piece.size_bytes:
                        continue
                    _change(chain, piece, data)
                    if blake3(data.data).digest() == piece.digest:
                        file.seek(piece.offset)
                        file.write(data.data)
                        made.append(piece.index)
    return made


def _cover(chain: Sequence[Delta], base: Path, name: str) -> bool:
    path = base / name
    return path.is_file() and all(
        name in delta.files and delta.files[name].size_bytes == path.stat().st_size
        for delta in chain
    )


def _change(chain: Sequence[Delta], piece: PieceToMake, data: npt.NDArray[np.uint8]) -> None:
    """Apply the deltas of a chain to a piece of the base, in place."""
    for start in range(0, piece.size_bytes, DELTA_BLOCK_BYTES):
        checkpoint()
        part = data[start : start + DELTA_BLOCK_BYTES]
        for delta in chain:
            delta.change(piece.name, (piece.offset + start) // DELTA_BLOCK_BYTES, part)


class DeltaService:
    """Implements `swarm.shardcast.jobs.DeltaService`."""

    reads_in_home = ("checkpoints",)

    async def encode(self, job: jobs.EncodeDelta) -> DeltaEncoded:
        return await trio.to_thread.run_sync(
            lambda: encode(
                Path(job.base), Path(job.new), Path(job.out), job.names, limit_bytes=job.limit_bytes
            )
        )

    async def make(self, job: jobs.MakePieces) -> jobs.PiecesMade:
        deltas = [Path(each) for each in job.deltas]
        made = await trio.to_thread.run_sync(
            make, Path(job.base), Path(job.target), deltas, job.pieces
        )
        return jobs.PiecesMade(made=made)


_SERVICE: type[jobs.DeltaService] = DeltaService
