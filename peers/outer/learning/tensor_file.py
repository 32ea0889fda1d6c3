"""Files of fp32 tensors, mapped into memory and read and written a piece at a time.

They are safetensors files whose bytes follow from names and tensors alone: tensors sorted by name,
the header without freedom. So equal tensors mean equal files."""

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from blake3 import blake3
from torch import Tensor

from peers.learning.stored import Slices
from swarm.errors import UserError
from swarm.world.disk import sync_path

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name, sorted by name."""


class TensorFile:
    """A file of fp32 tensors, open for reading."""

    def __init__(self, path: Path, format: str) -> None:
        """Read the header; raises `UserError` for a file of another format."""
        self.path = path
        try:
            file: Any = safetensors.safe_open(path, framework="pt")
            names = sorted(file.keys())
            self.shapes: Shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            dtypes = {file.get_slice(name).get_dtype() for name in names}
            found = (file.metadata() or {}).get("format")
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({error})") from error
        if found != format or dtypes != {"F32"}:
            raise UserError(f"{path} has the format {found!r}, not {format!r} in fp32")
        self._file = file

    def piece(self, name: str, piece: slice) -> Tensor:
        """A piece of a tensor, flat fp32; a copy."""
        # `get_tensor` maps the whole tensor: only the pages of the piece are read.
        whole: Tensor = self._file.get_tensor(name)
        return whole.reshape(-1)[piece].clone()

    def part(self, name: str, slices: Slices) -> Tensor:
        """A part of a tensor, in its own dimensions; it may be mapped, so do not write to it."""
        part: Tensor = self._file.get_tensor(name)[slices]
        return part

    def digest(self) -> bytes:
        """BLAKE3-256 of the file."""
        return _digest(self.path)


class TensorFileWriter:
    """A file of fp32 tensors in the making; all of its pieces must be written."""

    def __init__(self, path: Path, format: str, shapes: Shapes) -> None:
        entries: dict[str, Any] = {"__metadata__": {"format": format}}
        self._starts: dict[str, int] = {}
        end = 0
        for name in sorted(shapes):
            size = 4 * prod(shapes[name])
            entries[name] = {
                "dtype": "F32",
                "shape": shapes[name],
                "data_offsets": [end, end + size],
            }
            self._starts[name] = end
            end += size
        raw = json.dumps(entries, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        self._data = 8 + len(raw)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            file.truncate(self._data + end)
        self._path = path
        self._bytes = np.memmap(path, "u1", "r+")

    def write(self, name: str, piece: slice, value: Tensor) -> None:
        """Write a piece of a tensor, flat fp32."""
        start = self._data + self._starts[name] + 4 * piece.start
        raw = value.contiguous().numpy().astype("<f4").view("u1")
        self._bytes[start : start + len(raw)] = raw

    def finish(self) -> bytes:
        """Make the file durable; return its BLAKE3-256 digest."""
        self._bytes.flush()
        sync_path(self._path)
        return _digest(self._path)


def _digest(path: Path) -> bytes:
    digest: bytes = blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
    return digest
