"""The messages of the piece plane: the proof of a client, and the frames of a blob stream."""

from __future__ import annotations

import msgspec

from swarm import PROTOCOL_VERSION
from swarm.identity import PeerId

BLOB_PROTOCOL = f"/swarm/blob/{PROTOCOL_VERSION}.0.0"
PROOF_DOMAIN = b"swarm/1/bulk-proof\x00"
CHALLENGE_BYTES = 32


class Proof(msgspec.Struct, array_like=True, frozen=True):
    """The body of `POST /admission`."""

    peer: str
    signature: bytes
    credential: bytes


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """The first frame of a blob stream."""

    push: bool
    digest: bytes
    size_bytes: int
    credential: bytes


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """The server's frames: an HTTP status (100: continue), a reason and the blob's size."""

    status: int
    reason: str
    size_bytes: int


encode = msgspec.msgpack.Encoder().encode
decode_proof = msgspec.msgpack.Decoder(Proof).decode
decode_ask = msgspec.msgpack.Decoder(Ask).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def proof_message(server: PeerId, challenge: bytes) -> bytes:
    """The bytes that a client signs to prove its identity to `server`."""
    return PROOF_DOMAIN + server.encode("ascii") + b"\x00" + challenge
