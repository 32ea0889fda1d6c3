"""Frames between a process and one that it started: 4 bytes of length, then msgpack."""

import socket
import struct
import time
from typing import Any

import msgspec

BYTES_MAX = 1 << 24
"""Longest frame, unless its users agree on another bound."""

_HEADER = struct.Struct(">I")


def send(connection: socket.socket, value: Any, most: int = BYTES_MAX) -> None:
    """Send a value; raises `ValueError` for one that fits no frame."""
    raw = msgspec.msgpack.encode(value)
    if len(raw) > most:
        raise ValueError(f"a frame of {len(raw)} bytes; {most} are the most")
    connection.sendall(_HEADER.pack(len(raw)) + raw)


def receive(
    connection: socket.socket, seconds: float | None = None, most: int = BYTES_MAX
) -> bytes:
    """The next frame. Raises `EOFError` at the end, `ValueError` for one that is too long, and
    `TimeoutError` after `seconds`."""
    deadline = None if seconds is None else time.monotonic() + seconds
    (size,) = _HEADER.unpack(_exactly(connection, _HEADER.size, deadline))
    if size > most:
        raise ValueError(f"a frame of {size} bytes; {most} are the most")
    return _exactly(connection, size, deadline)


def _exactly(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    raw = bytearray()
    while len(raw) < size:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        chunk = connection.recv(min(size - len(raw), 1 << 20))
        if not chunk:
            raise EOFError("the connection ended")
        raw += chunk
    return bytes(raw)
