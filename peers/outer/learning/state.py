"""The outer state: the weights that all trainers agree on, and the momentum of their updates.

Both are fp32, in one safetensors file that is mapped into memory, so they take none of a device's
memory. The file's bytes follow from the tensors alone: its BLAKE3 digest is the state's digest, and
trainers with the same digest hold the same weights, bit for bit.

`merge` is a pure function of the state before and a list of contributions. Every operation is one
rounded IEEE operation per element (a product and a sum are never fused), in the order of the
trainers' ids, so neither the machine, the number of threads nor the order of arrival changes a bit.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from blake3 import blake3
from torch import Tensor

from peers.outer.learning.contribution import Contribution, Shapes, pieces
from swarm.errors import UserError
from swarm.world.progress import report

FILE = "outer.safetensors"
"""Name of the file in a state's folder."""

_FORMAT = "swarm-outer-state-1"
_WEIGHT, _MOMENTUM = "weight.", "momentum."


@dataclass(frozen=True)
class OuterOptimiser:
    """Nesterov momentum on the mean pseudo-gradient (DiLoCo, 2311.08105)."""

    learning_rate: float = 0.7
    momentum: float = 0.9


@dataclass(frozen=True)
class Given:
    """A contribution to merge."""

    trainer: str
    """Peer id; the order of the sum."""
    tokens: int
    """Its weight in the mean."""
    path: Path


class StateFile:
    """A state file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Read the header; raises `UserError` for another file."""
        self.path = path
        try:
            file: Any = safetensors.safe_open(path, framework="pt")
            metadata, names = file.metadata() or {}, list(file.keys())
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            dtypes = {file.get_slice(name).get_dtype() for name in names}
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"outer state {path} cannot be read ({error})") from error
        self._file = file
        self.shapes: Shapes = {
            name.removeprefix(_WEIGHT): shapes[name]
            for name in sorted(shapes)
            if name.startswith(_WEIGHT)
        }
        momenta = {_MOMENTUM + name: shape for name, shape in self.shapes.items()}
        others = {name: shape for name, shape in shapes.items() if not name.startswith(_WEIGHT)}
        if metadata.get("format") != _FORMAT or momenta != others or dtypes != {"F32"}:
            raise UserError(f"{path} is no outer state of this version; fetch the state again")

    def weight(self, name: str, piece: slice = slice(None)) -> Tensor:
        """A piece of a weight, flat fp32; a copy."""
        return self._read(_WEIGHT + name, piece)

    def momentum(self, name: str, piece: slice = slice(None)) -> Tensor:
        """A piece of a momentum, flat fp32; a copy."""
        return self._read(_MOMENTUM + name, piece)

    def _read(self, name: str, piece: slice) -> Tensor:
        # The mapped tensor is torch's own memory: only the pages of the piece are read.
        whole: Tensor = self._file.get_tensor(name)
        return whole.reshape(-1)[piece].clone()

    def digest(self) -> bytes:
        """BLAKE3-256 of the file."""
        return digest_of(self.path)


class _Writer:
    """A state file in the making, mapped into memory."""

    def __init__(self, path: Path, shapes: Shapes) -> None:
        entries: dict[str, Any] = {"__metadata__": {"format": _FORMAT}}
        self._starts: dict[str, int] = {}
        end = 0
        for name in sorted([prefix + name for name in shapes for prefix in (_WEIGHT, _MOMENTUM)]):
            shape = shapes[name.partition(".")[2]]
            size = 4 * prod(shape)
            entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
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

    def write(self, name: str, piece: slice, weight: Tensor, momentum: Tensor) -> None:
        for full, value in ((_WEIGHT + name, weight), (_MOMENTUM + name, momentum)):
            start = self._data + self._starts[full] + 4 * piece.start
            raw = value.contiguous().numpy().astype("<f4").view("u1")
            self._bytes[start : start + len(raw)] = raw

    def finish(self) -> bytes:
        """Make the file durable and return its digest."""
        self._bytes.flush()
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return digest_of(self._path)


def digest_of(path: Path) -> bytes:
    """BLAKE3-256 of a file."""
    digest: bytes = blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
    return digest


def begin(weights: Mapping[str, Tensor], path: Path) -> bytes:
    """Write the state before round 0, of these weights without momentum; return its digest."""
    shapes = {name: tuple(weights[name].shape) for name in sorted(weights)}
    writer = _Writer(path, shapes)
    for name, shape in shapes.items():
        flat = weights[name].detach().float().reshape(-1)
        for piece in pieces(shape):
            report()
            writer.write(name, piece, flat[piece], torch.zeros(piece.stop - piece.start))
    return writer.finish()


def merge(
    before: StateFile, given: Sequence[Given], optimiser: OuterOptimiser, path: Path
) -> bytes:
    """Write the state after a round durably; return its digest.

    The order of `given`, at least one, does not matter. Raises `BadContribution` for a file that
    `Contribution.check` refuses.
    """
    given = sorted(given, key=lambda each: each.trainer)
    total = sum(each.tokens for each in given)
    writer = _Writer(path, before.shapes)
    with ExitStack() as stack:
        opened = [stack.enter_context(Contribution(each.path, before.shapes)) for each in given]
        for name, shape in before.shapes.items():
            for piece in pieces(shape):
                report()
                mean = torch.zeros(piece.stop - piece.start)
                for each, file in zip(given, opened, strict=True):
                    mean += file.piece(name, piece) * (each.tokens / total)
                momentum = before.momentum(name, piece) * optimiser.momentum
                momentum += mean
                step = momentum * optimiser.momentum
                step += mean
                step *= optimiser.learning_rate
                writer.write(name, piece, before.weight(name, piece) - step, momentum)
    return writer.finish()
