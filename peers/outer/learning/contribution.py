"""Contribution files: a trainer's pseudo-gradient of one round, compressed.

    magic, 8 bytes      length of the header, 4 bytes, little-endian as everything here
    header, msgpack     `Header`
    lengths             4 bytes each: the frame's, for every piece of every tensor, in order
    frames              one per piece (`compression`)

A tensor is cut into pieces of `PIECE` elements. Names and shapes are those of the outer state, in
its order. A reader knows them, so nothing in a file decides how much memory is taken.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from peers.outer.learning.compression import (
    CODES,
    PIECE,
    BadContribution,
    decode_piece,
    encode_piece,
    frame_bytes_max,
)
from swarm.errors import DECODE_ERRORS
from swarm.world.progress import report

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


_decode_header = msgspec.msgpack.Decoder(Header).decode


def pieces(shape: Sequence[int]) -> Iterator[slice]:
    """The pieces of a flat tensor."""
    count = prod(shape)
    for start in range(0, count, PIECE):
        yield slice(start, min(count, start + PIECE))


def file_bytes_max(shapes: Shapes, compression: str) -> int:
    """Bound of the size of a contribution to a policy of these shapes."""
    code = CODES[compression]
    frames = sum(
        4 + frame_bytes_max(code, piece.stop - piece.start)
        for shape in shapes.values()
        for piece in pieces(shape)
    )
    return _header_bytes_max(shapes) + frames


def _header_bytes_max(shapes: Shapes) -> int:
    return 1024 + _NAME_BYTES * len(shapes)


def write(
    path: Path,
    header: Header,
    piece_of: Callable[[str, slice], Tensor],
    keep: Callable[[str, slice, Tensor], None],
) -> None:
    """Write a contribution durably.

    `piece_of` gives a piece's values, flat fp32. `keep` gets what the file does not say of them.
    """
    code = CODES[header.compression]
    raw = msgspec.msgpack.encode(header)
    cut = [(name, piece) for name, shape in header.tensors for piece in pieces(shape)]
    begin = len(MAGIC) + 4 + len(raw)
    lengths = np.zeros(len(cut), "<u4")
    with path.open("wb") as file:
        file.seek(begin + lengths.nbytes)
        for index, (name, piece) in enumerate(cut):
            report()
            frame, rest = encode_piece(code, piece_of(name, piece))
            keep(name, piece, rest)
            lengths[index] = len(frame)
            file.write(frame)
        file.seek(0)
        file.write(MAGIC + struct.pack("<I", len(raw)) + raw + lengths.tobytes())
        file.flush()
        os.fsync(file.fileno())


def write_values(values: Tensor, shapes: Shapes, path: Path) -> None:
    """Write flat values, fp32 [all tensors, in order], as a contribution; durably."""
    starts = dict(zip(shapes, accumulate(map(prod, shapes.values()), initial=0), strict=False))

    def piece_of(name: str, piece: slice) -> Tensor:
        return values[starts[name] + piece.start : starts[name] + piece.stop]

    write(path, Header("fp32", list(shapes.items())), piece_of, lambda *_: None)


class Contribution:
    """An open contribution file whose head was checked; a context manager."""

    def __init__(self, path: Path, shapes: Shapes) -> None:
        """Read the head of a contribution to a policy of these shapes.

        Raises `BadContribution` for any other file, `OSError` if the disk fails.
        """
        self._file: BufferedReader = path.open("rb")
        try:
            size = os.fstat(self._file.fileno()).st_size
            self.header = self._read_header(shapes)
            self._starts = self._read_lengths(shapes, size)
        except BaseException:
            self._file.close()
            raise
        self._code = CODES[self.header.compression]

    def __enter__(self) -> Contribution:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def _read_header(self, shapes: Shapes) -> Header:
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
        return header

    def _read_lengths(self, shapes: Shapes, size: int) -> dict[tuple[str, int], tuple[int, int]]:
        """Offset and length of each piece's frame, by tensor and first element."""
        cut = [(name, piece) for name, shape in shapes.items() for piece in pieces(shape)]
        raw = self._file.read(4 * len(cut))
        offset = self._file.tell()
        code = CODES[self.header.compression]
        starts = {}
        if len(raw) < 4 * len(cut):
            raise BadContribution("the file ends before its frames")
        for (name, piece), length in zip(cut, np.frombuffer(raw, "<u4").tolist(), strict=True):
            if length > frame_bytes_max(code, piece.stop - piece.start):
                raise BadContribution(f"a frame of {name} has {length} bytes, too many")
            starts[name, piece.start] = (offset, length)
            offset += length
        if offset != size:
            raise BadContribution(f"the file has {size} bytes; its frames end at {offset}")
        return starts

    def piece(self, name: str, piece: slice) -> Tensor:
        """The values of a piece, flat fp32; raises `BadContribution`."""
        offset, length = self._starts[name, piece.start]
        self._file.seek(offset)
        try:
            return decode_piece(self._code, self._file.read(length), piece.stop - piece.start)
        except BadContribution as error:
            raise BadContribution(f"tensor {name}: {error}") from error

    def values(self) -> Tensor:
        """All values, flat fp32, one tensor after the other; raises `BadContribution`."""
        cut = [(name, each) for name, shape in self.header.tensors for each in pieces(shape)]
        return torch.cat([self.piece(name, each) for name, each in cut])

    def check(self) -> float:
        """Decode everything; return the norm. Raises `BadContribution` for the first fault."""
        squares = 0.0
        for name, shape in self.header.tensors:
            for piece in pieces(shape):
                report()
                squares += _squares(self.piece(name, piece))
        return math.sqrt(squares)


def _squares(values: Tensor) -> float:
    """The sum of squares, equal to the bit on every machine.

    The order in which `torch.sum` adds depends on the processor and its threads. Here every level
    of a fixed tree is one addition per element; the square of an fp32 value is exact in fp64.
    """
    sums = values.double().square()
    while (count := len(sums)) > 1:
        half = (count + 1) // 2
        sums[: count - half] += sums[half:]
        sums = sums[:half]
    return float(sums[0])
