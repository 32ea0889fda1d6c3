"""The frames in which neighbours announce their pieces (`/swarm/have/1.0.0`)."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from swarm.shardcast import limits
from swarm.wire.messages import Digest

ENTRIES_MAX = 16
"""Entries of a frame."""

CLAIMS_MAX = 256
"""Checkpoints remembered per neighbour; the oldest is forgotten. Trainers that merge hold one for
each contribution of some rounds."""

CLAIMED_PIECES_MAX = 16 * limits.CHECKPOINT_PIECES_MAX
"""Pieces of all checkpoints remembered per neighbour: 128 KiB."""

PROTOCOL = "/swarm/have/1.0.0"

_BITMAP_BYTES_MAX = limits.CHECKPOINT_PIECES_MAX // 8
_INDICES_MAX = 4096
"""Pieces named in one entry; more are sent as a bitmap."""
FRAME_BYTES_MAX = 512 * 1024
_Index = Annotated[int, Meta(ge=0, lt=limits.CHECKPOINT_PIECES_MAX)]


class Bitmap(msgspec.Struct, array_like=True, frozen=True, tag="bitmap"):
    manifest: Digest
    pieces: Annotated[bytes, Meta(max_length=_BITMAP_BYTES_MAX)]


class Pieces(msgspec.Struct, array_like=True, frozen=True, tag="pieces"):
    manifest: Digest
    indices: Annotated[list[_Index], Meta(max_length=_INDICES_MAX)]
    count: Annotated[int, Meta(ge=0, le=limits.CHECKPOINT_PIECES_MAX)]
    """Number of all pieces held: `indices` leaves out those that the receiver claims itself."""


class Complete(msgspec.Struct, array_like=True, frozen=True, tag="complete"):
    manifest: Digest


class Gone(msgspec.Struct, array_like=True, frozen=True, tag="gone"):
    manifest: Digest


Entry: TypeAlias = Bitmap | Pieces | Complete | Gone
Frame: TypeAlias = Annotated[list[Entry], Meta(max_length=ENTRIES_MAX)]

_decoder: msgspec.msgpack.Decoder[list[Entry]] = msgspec.msgpack.Decoder(Frame)
decode = _decoder.decode
"""The entries of a frame; raises `DECODE_ERRORS`."""


def bitmap(manifest: bytes, bits: int) -> Bitmap:
    return Bitmap(manifest, bits.to_bytes((bits.bit_length() + 7) // 8, "little"))


def indices_of(bits: int) -> list[int]:
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def encode(entries: list[Entry]) -> bytes:
    return msgspec.msgpack.encode(entries)
