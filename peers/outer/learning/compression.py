"""Compression of pseudo-gradients, a piece of a tensor at a time.

A *code* turns a piece, flat fp32 [n], into bytes, and says which values these bytes decode to. What
the bytes do not say, the sender keeps and adds to its next pseudo-gradient (error feedback, Seide
et al. 2014), so no part of an update is lost: it arrives later. The bytes are quantised once and
forwarded as they are, so every trainer decodes the same values to the bit.

- `fp32`: as they are.
- `int8`: one of 255 levels from −6σ to 6σ, σ being the root mean square of a block of 512 values.
  Larger values are clipped, and the rest follows in the next rounds.

Every payload is a zstd frame of a size that is known in advance.
"""

from typing import Protocol

import numpy as np
import torch
import zstandard
from torch import Tensor

from swarm.errors import PeerError

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
        ...

    def decode(self, payload: bytes, count: int) -> Tensor:
        """The values of a payload, fp32 [`count`]; raises `BadContribution`."""
        ...

    def payload_bytes(self, count: int) -> int:
        """Size of an uncompressed payload of `count` values."""
        ...


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
        scales = CLIP_SIGMAS / LEVELS * blocks.square().mean(dim=1).sqrt()
        # The last block is filled up with zeros, which would make its σ too small.
        rest = len(values) % BLOCK
        if rest:
            scales[-1] *= (BLOCK / rest) ** 0.5
        steps = torch.where(scales > 0, scales, torch.ones_like(scales))
        levels = (blocks / steps[:, None]).round().clamp(-LEVELS, LEVELS).to(torch.int8)
        levels[scales == 0] = 0
        return (
            scales.numpy().astype("<f4").tobytes()
            + levels.flatten()[: len(values)].numpy().tobytes()
        )

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


CODES: dict[str, Code] = {"fp32": Plain(), "int8": Int8()}
"""The codes, by their names in `swarm.jobs.outer.Compression`."""


def encode_piece(code: Code, values: Tensor) -> tuple[bytes, Tensor]:
    """A piece's frame, and what the receiver of the frame is missing, fp32 [n]."""
    payload = code.encode(values)
    frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(payload)
    return frame, values - code.decode(payload, len(values))


def decode_piece(code: Code, frame: bytes, count: int) -> Tensor:
    """The values of a frame, fp32 [`count`], all finite and in range; raises `BadContribution`."""
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
