"""The messages of the piece plane: heads of HTTP, the proof of a client, frames of a stream."""

import functools
import re
import urllib.parse

import msgspec

from swarm.transport import FetchError
from swarm.wire.identity import PeerId

BLOB_PROTOCOL = "/swarm/blob/2.0.0"
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


# --- heads ---

BLOB_PATH = re.compile(rb"/blob/([0-9a-f]{64})")
PLAIN_GET = re.compile(rb"GET /blob/([0-9a-f]{64}) HTTP/1\.1\r\nhost: [!-~]{1,300}\r\n\r\n")
"""A peer's request for a piece. Other headers would have no meaning here."""
PLAIN_HEAD = re.compile(
    rb"HTTP/1\.1 200 \r\ncontent-length: (\d{1,15})\r\n"
    rb"content-type: application/octet-stream\r\n\r\n"
)
"""The head of its answer, as `answer_head` writes it."""
PLAIN_HEAD_BYTES_MAX = 256

ROOT_CHARACTERS_MAX = 300


MISDIRECTED = 421
"""HTTP status for a proof to another peer: both have this address, each in a private network."""


class Unreachable(FetchError):
    """No connection to a root could be made: another root or a stream may work."""


def answer_head(status: int, size_bytes: int, kind: bytes, *, close: bool = False) -> bytes:
    end = b"connection: close\r\n\r\n" if close else b"\r\n"
    return b"HTTP/1.1 %d \r\ncontent-length: %d\r\ncontent-type: %s\r\n%s" % (
        status,
        size_bytes,
        kind,
        end,
    )


def last_head(status: int) -> bytes:
    """The head of a refusal after which the connection ends; the reason follows."""
    return b"HTTP/1.1 %d Refused\r\nconnection: close\r\ncontent-type: text/plain\r\n\r\n" % status


def request_head(
    root: str, method: bytes, path: str, headers: list[tuple[bytes, bytes]] | None = None
) -> bytes:
    prefix, host = _prefix_and_host(root)
    lines = [b"%s %s%s HTTP/1.1" % (method, prefix, path.encode("ascii")), b"host: " + host]
    lines += [name + b": " + value for name, value in headers or []]
    return b"\r\n".join([*lines, b"", b""])


def blob_request(root: str, digest: bytes) -> bytes:
    return request_head(root, b"GET", f"/blob/{digest.hex()}")


@functools.lru_cache(maxsize=256)
def split_root(root: str) -> tuple[str, int, bool]:
    """(host, port, whether it is https); raises `Unreachable`."""
    try:
        parts = urllib.parse.urlsplit(root)
        printable = root.isascii() and root.isprintable() and " " not in root
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("no http root")
        plain = printable and len(root) <= ROOT_CHARACTERS_MAX
        if not plain or parts.query or parts.fragment or "@" in parts.netloc:
            raise ValueError("no plain root")
        secure = parts.scheme == "https"
        return parts.hostname, parts.port or (443 if secure else 80), secure
    except ValueError as error:
        raise Unreachable(f"{root[:100]!r} is no http://host:port address") from error


@functools.lru_cache(maxsize=256)
def _prefix_and_host(root: str) -> tuple[bytes, bytes]:
    """(path, host header) of a root that `split_root` has accepted."""
    parts = urllib.parse.urlsplit(root)
    return parts.path.rstrip("/").encode("ascii"), parts.netloc.encode("ascii")
