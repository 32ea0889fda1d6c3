"""Frames between a peer and its child process: a 4-byte big-endian length, then msgpack.

The owner's first frame is an `Assignment`; every later one is a `Request`. The child's frames are
`Response`s. The number in a frame names the call that it belongs to; 0 is the assignment."""

from typing import Any

import msgspec

FRAME_BYTES_MAX = 256 << 20
"""Largest frame. Jobs and replies are small: large data is in files. This limits the memory that a
compromised child can make its owner use."""


class Assignment(msgspec.Struct, array_like=True):
    """The service that a child has to run, and its settings."""

    service: str
    """`package.module:Class`."""
    setup: msgspec.Raw
    memory_limit_bytes: int | None
    path: list[str] | None
    """The owner's module search path; None: another interpreter keeps its own."""
    folder: str
    """The owner's working folder."""
    environment: dict[bytes, bytes]
    """The owner's environment variables, which a forked child did not inherit. Libraries that the
    fork server preloaded have already read the server's own."""


class Call(msgspec.Struct, array_like=True, tag="call"):
    """Do a job."""

    number: int
    method: str
    job: msgspec.Raw


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    """Cancel a call; the child must still answer it."""

    number: int


Request = Call | Cancel


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    """The end of a call, and its reply."""

    number: int
    reply: msgspec.Raw


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The end of a call that raised."""

    number: int
    kind: str
    """Name of the exception's class."""
    message: str
    is_users: bool = False
    """Whether it is a `UserError`."""


class Progress(msgspec.Struct, array_like=True, tag="progress"):
    """Work on this call has advanced."""

    number: int


Response = Answer | Failed | Progress

_responses: msgspec.msgpack.Decoder[Response] = msgspec.msgpack.Decoder(Response)
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


def raw(value: Any) -> msgspec.Raw:
    """Encode a setup, job or reply."""
    return msgspec.Raw(msgspec.msgpack.encode(value))


def encode(message: Assignment | Request | Response) -> bytes:
    """Encode a frame with its length. Raises `ValueError` when it is too large."""
    body = msgspec.msgpack.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"{len(body)} bytes; at most {FRAME_BYTES_MAX} are allowed")
    return len(body).to_bytes(4, "big") + body


def decode_request(body: bytes) -> Request:
    return _requests.decode(body)


def decode_response(body: bytes) -> Response:
    """Decode a response from a child that may be compromised. Raises `DECODE_ERRORS`."""
    return _responses.decode(body)


class FrameReader:
    """Divides the bytes of a stream into frames."""

    def __init__(self, receive: Any) -> None:
        """`receive(bytes_max)`: an async function that returns some bytes, none at the end."""
        self._receive = receive
        self._buffer = bytearray()

    async def next(self) -> bytes:
        """Read the next frame's body. Raises `EOFError` at the end, `DecodeError` if too large."""
        await self._fill(4)
        size = int.from_bytes(self._buffer[:4], "big")
        if size > FRAME_BYTES_MAX:
            raise msgspec.DecodeError(f"{size} bytes announced")
        await self._fill(4 + size)
        body = bytes(self._buffer[4 : 4 + size])
        del self._buffer[: 4 + size]
        return body

    async def _fill(self, count: int) -> None:
        while len(self._buffer) < count:
            block = await self._receive(1 << 20)
            if not block:
                raise EOFError
            self._buffer += block
