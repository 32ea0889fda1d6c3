"""A stranger's client that speaks noise and then whatever it likes: raw multistream and yamux."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.transport import Transport as NoiseTransport

from swarm.wire.identity import Identity

DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
FRAME = struct.Struct("!BBHII")


def name(text: str | bytes) -> bytes:
    """One multistream message."""
    body = (text.encode() if isinstance(text, str) else text) + b"\n"
    length = bytearray()
    rest = len(body)
    while rest >= 0x80:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*length, rest]) + body


MULTISTREAM = name("/multistream/1.0.0")


def frame(kind: int, flags: int, stream: int, length: int, *, version: int = 0) -> bytes:
    """The head of a yamux frame, sensible or not."""
    return FRAME.pack(version, kind, flags, stream, length)


def data(stream: int, body: bytes, flags: int = 0) -> bytes:
    """A DATA frame."""
    return frame(DATA, flags, stream, len(body)) + body


def opening(stream: int, protocol: str) -> bytes:
    """A stream opened for a protocol, its negotiation included."""
    return data(stream, MULTISTREAM + name(protocol), SYN)


class Hostile:
    """One connection, encrypted and with yamux agreed on."""

    def __init__(self, connection) -> None:
        self._connection = connection

    async def send(self, raw: bytes) -> None:
        await self._connection.write(raw)

    async def receive(self) -> tuple[int, int, int, bytes]:
        """The next frame: kind, flags, stream, and its body (of DATA) or its number."""
        _, kind, flags, stream, length = FRAME.unpack(await self._read(FRAME.size))
        body = await self._read(length) if kind == DATA and length else struct.pack("!I", length)
        return kind, flags, stream, body

    async def _read(self, size: int) -> bytes:
        read = bytearray()
        while len(read) < size:
            more = await self._connection.read(size - len(read))
            if not more:
                raise EOFError
            read += more
        return bytes(read)

    async def drain(self) -> None:
        """Read until the other side ends it."""
        with suppress(Exception):
            while True:
                await self.receive()


@asynccontextmanager
async def tcp(address: str, source: str | None = None) -> AsyncIterator[trio.SocketStream]:
    """A TCP connection to a multiaddr, from another address of loopback if wanted."""
    parts = address.split("/")
    async with await trio.open_tcp_stream(parts[2], int(parts[4]), local_address=source) as stream:
        yield stream


@asynccontextmanager
async def connected(
    address: str, identity: Identity, source: str | None = None
) -> AsyncIterator[Hostile]:
    """Noise and yamux with the peer at a multiaddr that ends in its id."""
    async with tcp(address, source) as stream:
        raw = RawConnection(TrioTCPStream(stream), True)
        await _agree(raw, "/noise")
        noise = NoiseTransport(
            create_new_key_pair(identity.seed), create_new_x25519_key_pair().private_key
        )
        secure = await noise.secure_outbound(raw, ID.from_string(address.rpartition("/")[2]))
        await _agree(secure, "/yamux/1.0.0")
        yield Hostile(secure)


async def _agree(carrier, protocol: str) -> None:
    wanted = MULTISTREAM + name(protocol)
    await carrier.write(wanted)
    got = b""
    while len(got) < len(wanted):
        got += await carrier.read(len(wanted) - len(got))
    assert got == wanted
