"""Contribution files: a trainer's pseudo-gradient of one round, compressed.

    magic, 8 bytes      length of the header, 4 bytes, little-endian as everything here
    header, msgpack     `Header`
    lengths             4 bytes each: the frame's, for every piece of every tensor, in order
    frames              one per piece, zstd of a size that is known in advance

A contribution is one file, or one for each of the run's shards: as many nearly equal parts of all
values, in the outer state's order (`cut`). A tensor's part of a shard is cut into pieces of `PIECE`
elements. Names and shapes are those of the outer state. A reader knows them, so nothing in a file
decides how much memory is taken. The mean of all contributions' same shard has the same form.

A *code* turns a piece, flat fp32 [n], into bytes, and says which values these bytes decode to. What
the bytes do not say, the sender keeps and adds to its next pseudo-gradient (error feedback, Seide
et al. 2014), so no part of an update is lost: it arrives later. The bytes are quantised once and
forwarded as they are, so every trainer decodes the same values to the bit.

- `fp32`: as they are.
- `int8`: one of 255 levels from −6σ to 6σ, σ being the root mean square of a block of 512 values.
  Larger values are clipped, and the rest follows in the next rounds. In the mean of a shard, whose
  rest nobody keeps, the levels go up to the block's largest value instead, so none is clipped, and
  every operation has the same result on every machine."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import torch
import zstandard
from torch import Tensor

from swarm.errors import DECODE_ERRORS, PeerError
from swarm.world.progress import report

PIECE = 1 << 22
"""Elements encoded at a time: 16 MiB in fp32. A multiple of `BLOCK`."""

BLOCK = 512
"""Values that share a scale: their scales take 0.8 % of the bytes. In larger blocks a few large
values among zeros, as in the embeddings of rare tokens, are clipped for more rounds."""

CLIP_SIGMAS = 6.0
"""INTELLECT-1's clip (2412.01152); at 3 its error is five times as large on heavy tails."""

LEVELS = 127

VALUE_MAX = 100.0
"""Largest value of a pseudo-gradient: no round moves a weight this far."""

_ZSTD_LEVEL = 1


class BadContribution(PeerError):
    """A pseudo-gradient is refused; the message says why in one sentence."""


class Code(Protocol):
    """Writes a piece of a pseudo-gradient as bytes and reads it again."""

    def encode(self, values: Tensor) -> bytes:
        """The payload of `values`, fp32 [n], finite and at most `VALUE_MAX` in size."""

    def decode(self, payload: bytes, count: int) -> Tensor:
        """The values of a payload, fp32 [`count`]; raises `BadContribution`."""

    def payload_bytes(self, count: int) -> int:
        """Size of an uncompressed payload of `count` values."""


class Plain:
    """All values in fp32."""

    def encode(self, values: Tensor) -> bytes:
        return values.numpy().astype("<f4").tobytes()

    def decode(self, payload: bytes, count: int) -> Tensor:
        _check_size(payload, 4 * count)
        return _fp32(np.frombuffer(payload, "<f4"))

    def payload_bytes(self, count: int) -> int:
        return 4 * count


class Int8:
    """Blocks of 8-bit levels, each with one scale: the scales of all blocks, then the levels."""

    def encode(self, values: Tensor) -> bytes:
        blocks = _in_blocks(values)
        scales = self._scales(blocks, len(values) % BLOCK)
        steps = torch.where(scales > 0, scales, torch.ones_like(scales))
        levels = (blocks / steps[:, None]).round().clamp(-LEVELS, LEVELS).to(torch.int8)
        levels[scales == 0] = 0
        return (
            scales.numpy().astype("<f4").tobytes()
            + levels.flatten()[: len(values)].numpy().tobytes()
        )

    def _scales(self, blocks: Tensor, rest: int) -> Tensor:
        """The scale of each block, fp32 [blocks]; the last has `rest` values, 0: as many as all."""
        scales = CLIP_SIGMAS / LEVELS * blocks.square().mean(dim=1).sqrt()
        # The last block is filled up with zeros, which would make its σ too small.
        if rest:
            scales[-1] *= (BLOCK / rest) ** 0.5
        return scales

    def decode(self, payload: bytes, count: int) -> Tensor:
        blocks = -(-count // BLOCK)
        _check_size(payload, 4 * blocks + count)
        scales = _fp32(np.frombuffer(payload, "<f4", blocks))
        levels = torch.from_numpy(np.frombuffer(payload, "i1", count, 4 * blocks).copy())
        if int(levels.min()) < -LEVELS:
            raise BadContribution(f"a level is {-LEVELS - 1}; levels are {-LEVELS} to {LEVELS}")
        return (_in_blocks(levels.float()) * scales[:, None]).flatten()[:count]

    def payload_bytes(self, count: int) -> int:
        return count + 4 * -(-count // BLOCK)


class Unclipped(Int8):
    """`Int8` up to the largest value of each block. Its bytes are read by `Int8`."""

    def _scales(self, blocks: Tensor, rest: int) -> Tensor:
        return blocks.abs().amax(dim=1) / LEVELS


CODES: dict[str, Code] = {"fp32": Plain(), "int8": Int8()}
"""The codes, by their names in `swarm.jobs.outer.Compression`."""

MEANS: dict[str, Code] = {"fp32": Plain(), "int8": Unclipped()}
"""The codes in which the mean of a shard is written."""


def encode_piece(code: Code, values: Tensor) -> tuple[bytes, Tensor]:
    """A piece's frame, and what the receiver of the frame is missing, fp32 [n]."""
    payload = code.encode(values)
    frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(payload)
    return frame, values - code.decode(payload, len(values))


def decode_piece(code: Code, frame: bytes, count: int, payloads: Any = None) -> Tensor:
    """The values of a frame, fp32 [`count`], all finite and in range; raises `BadContribution`.

    `payloads`: a hash of what frames decompress to, which does not depend on zstd's version."""
    most = code.payload_bytes(count)
    try:
        # Without a size in its head a frame may be read up to `most` bytes only.
        if zstandard.frame_content_size(frame) > most:
            raise BadContribution(f"a frame of {count} values holds more than {most} bytes")
        payload = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(
            frame, max_output_size=most, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise BadContribution(f"a frame is no zstd frame ({error})") from error
    if payloads is not None:
        payloads.update(payload)
    values = code.decode(payload, count)
    if not bool(values.isfinite().all()):
        raise BadContribution("a value is not finite")
    largest = float(values.abs().max())
    if largest > VALUE_MAX:
        raise BadContribution(f"a value is {largest:g}; {VALUE_MAX:g} is the most")
    return values


def frame_bytes_max(code: Code, count: int) -> int:
    """Bound of a frame of `count` values: zstd's own, for data that it cannot compress."""
    size = code.payload_bytes(count)
    return size + size // 128 + 128


def _in_blocks(values: Tensor) -> Tensor:
    """[n] → [blocks, `BLOCK`], the last block filled up with zeros."""
    missing = -len(values) % BLOCK
    return torch.nn.functional.pad(values, (0, missing)).view(-1, BLOCK)


def _fp32(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def _check_size(payload: bytes, wanted: int) -> None:
    if len(payload) != wanted:
        raise BadContribution(f"a piece has {len(payload)} bytes instead of {wanted}")


if TYPE_CHECKING:  # its library is not in the environments of other libraries that average
    from peers.outer.learning.tensor_file import Shapes

MAGIC = b"swouter1"

FILE = "contribution.swouter"
"""Name of the file in a contribution's folder."""

_NAME_BYTES = 512
"""A tensor's longest name and shape in a header, msgpack included."""


class Header(msgspec.Struct, array_like=True, frozen=True):
    compression: str
    tensors: list[tuple[str, tuple[int, ...]]]
    """Of the whole policy."""
    shard: int = 0
    shards: int = 1


_decode_header = msgspec.msgpack.Decoder(Header).decode


def pieces(shape: Sequence[int]) -> Iterator[slice]:
    """The pieces of a flat tensor."""
    count = prod(shape)
    for start in range(0, count, PIECE):
        yield slice(start, min(count, start + PIECE))


def cut(shapes: Shapes, shard: int = 0, shards: int = 1) -> list[tuple[str, slice]]:
    """The pieces of a shard, by tensor and elements of the flat tensor, in order.

    All values are divided at whole blocks, of which each shard has as many as another, or one more
    or less: no scale belongs to two shards."""
    blocks = {name: -(-prod(shape) // BLOCK) for name, shape in shapes.items()}
    total, before = sum(blocks.values()), 0
    first, end = total * shard // shards, total * (shard + 1) // shards
    found = []
    for name, shape in shapes.items():
        start = BLOCK * max(0, first - before)
        stop = min(prod(shape), BLOCK * (end - before))
        found += [(name, slice(at, min(stop, at + PIECE))) for at in range(start, stop, PIECE)]
        before += blocks[name]
    return found


def place(folder: Path, shard: int = 0, shards: int = 1) -> Path:
    """The file of a shard in a contribution's folder: each has a folder, fetched by itself."""
    return folder / str(shard) / FILE if shards > 1 else folder / FILE


def file_bytes_max(shapes: Shapes, compression: str, shards: int = 1) -> int:
    """Bound of the size of a contribution to a policy of these shapes."""
    code = CODES[compression]
    frames = sum(
        4 + frame_bytes_max(code, piece.stop - piece.start)
        for shard in range(shards)
        for _, piece in cut(shapes, shard, shards)
    )
    return shards * _header_bytes_max(shapes) + frames


def _header_bytes_max(shapes: Shapes) -> int:
    return 1024 + _NAME_BYTES * len(shapes)


def write(
    path: Path,
    header: Header,
    piece_of: Callable[[str, slice], Tensor],
    keep: Callable[[str, slice, Tensor], None] = lambda *_: None,
    codes: dict[str, Code] = CODES,
) -> None:
    """Write a file of a contribution durably.

    `piece_of` gives a piece's values, flat fp32. `keep` gets what the file does not say of them."""
    code = codes[header.compression]
    raw = msgspec.msgpack.encode(header)
    parts = cut(dict(header.tensors), header.shard, header.shards)
    begin = len(MAGIC) + 4 + len(raw)
    lengths = np.zeros(len(parts), "<u4")
    with path.open("wb") as file:
        file.seek(begin + lengths.nbytes)
        for index, (name, piece) in enumerate(parts):
            report()
            frame, rest = encode_piece(code, piece_of(name, piece))
            keep(name, piece, rest)
            lengths[index] = len(frame)
            file.write(frame)
        file.seek(0)
        file.write(MAGIC + struct.pack("<I", len(raw)) + raw + lengths.tobytes())
        file.flush()
        os.fsync(file.fileno())


def write_mean(path: Path, header: Header, piece_of: Callable[[str, slice], Tensor]) -> None:
    """Write the mean of some contributions' shard durably."""
    most = VALUE_MAX * (1 - 1e-5)  # no rounding may lead beyond what a reader accepts
    write(path, header, lambda *piece: piece_of(*piece).clamp_(-most, most), codes=MEANS)


def write_values(values: Tensor, shapes: Shapes, path: Path) -> None:
    """Write flat values, fp32 [all tensors, in order], as a contribution; durably."""
    starts = dict(zip(shapes, accumulate(map(prod, shapes.values()), initial=0), strict=False))

    def piece_of(name: str, piece: slice) -> Tensor:
        return values[starts[name] + piece.start : starts[name] + piece.stop]

    write(path, Header("fp32", list(shapes.items())), piece_of)


class Contribution:
    """An open contribution file whose head was checked; a context manager."""

    def __init__(self, path: Path, shapes: Shapes, shard: int = 0, shards: int = 1) -> None:
        """Read the head of a contribution to a policy of these shapes.

        Raises `BadContribution` for any other file, `OSError` if the disk fails."""
        self._file: BufferedReader = path.open("rb")
        try:
            size = os.fstat(self._file.fileno()).st_size
            self.header = self._read_header(shapes, shard, shards)
            self.cut = cut(shapes, shard, shards)
            self._starts = self._read_lengths(size)
        except BaseException:
            self._file.close()
            raise
        self._code = CODES[self.header.compression]

    def __enter__(self) -> Contribution:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def _read_header(self, shapes: Shapes, shard: int, shards: int) -> Header:
        head = self._file.read(len(MAGIC) + 4)
        if head[: len(MAGIC)] != MAGIC or len(head) < len(MAGIC) + 4:
            raise BadContribution("the file is no contribution of this version")
        (length,) = struct.unpack("<I", head[len(MAGIC) :])
        if length > _header_bytes_max(shapes):
            raise BadContribution(f"the header has {length} bytes; the policy's would be shorter")
        try:
            header = _decode_header(self._file.read(length))
        except DECODE_ERRORS as error:
            raise BadContribution(f"the header cannot be read ({error})") from error
        if header.compression not in CODES:
            raise BadContribution(f"the compression {header.compression!r} is unknown")
        given = dict(header.tensors)
        for name, shape in shapes.items():
            if given.get(name) != shape:
                raise BadContribution(
                    f"tensor {name} has shape {given.get(name)}; the policy's is {shape}"
                )
        if header.tensors != list(shapes.items()):
            raise BadContribution("its tensors are more than the policy's, or in another order")
        if (header.shard, header.shards) != (shard, shards):
            raise BadContribution(
                f"it is shard {header.shard} of {header.shards}; shard {shard} of {shards} was due"
            )
        return header

    def _read_lengths(self, size: int) -> dict[tuple[str, int], tuple[int, int]]:
        """Offset and length of each piece's frame, by tensor and first element."""
        raw = self._file.read(4 * len(self.cut))
        offset = self._file.tell()
        code = CODES[self.header.compression]
        starts = {}
        if len(raw) < 4 * len(self.cut):
            raise BadContribution("the file ends before its frames")
        for (name, piece), length in zip(self.cut, np.frombuffer(raw, "<u4").tolist(), strict=True):
            if length > frame_bytes_max(code, piece.stop - piece.start):
                raise BadContribution(f"a frame of {name} has {length} bytes, too many")
            starts[name, piece.start] = (offset, length)
            offset += length
        if offset != size:
            raise BadContribution(f"the file has {size} bytes; its frames end at {offset}")
        return starts

    def piece(self, name: str, piece: slice, payloads: Any = None) -> Tensor:
        """The values of a piece, flat fp32; raises `BadContribution`."""
        offset, length = self._starts[name, piece.start]
        self._file.seek(offset)
        count = piece.stop - piece.start
        try:
            return decode_piece(self._code, self._file.read(length), count, payloads)
        except BadContribution as error:
            raise BadContribution(f"tensor {name}: {error}") from error

    def values(self) -> Tensor:
        """All values, flat fp32, one tensor after the other; raises `BadContribution`."""
        return torch.cat([self.piece(*each) for each in self.cut])

    def check(self, payloads: Any = None) -> float:
        """Decode everything; return the norm. Raises `BadContribution` for the first fault."""
        squares = 0.0
        for name, piece in self.cut:
            report()
            squares += _squares(self.piece(name, piece, payloads))
        return math.sqrt(squares)


def _squares(values: Tensor) -> float:
    """The sum of squares, equal to the bit on every machine.

    The order in which `torch.sum` adds depends on the processor and its threads. Here every level
    of a fixed tree is one addition per element; the square of an fp32 value is exact in fp64."""
    sums = values.double().square()
    while (count := len(sums)) > 1:
        half = (count + 1) // 2
        sums[: count - half] += sums[half:]
        sums = sums[:half]
    return float(sums[0])
