"""Adapter from a libp2p stream to the `ByteStream` of `swarm.transport.framing`."""

from __future__ import annotations

import logging

import trio
from libp2p.abc import INetStream
from libp2p.network.stream.exceptions import StreamEOF

from swarm.transport import StreamError, limits
from swarm.transport.libp2p.guard import BROKEN

log = logging.getLogger(__name__)

BROKEN_STREAM = (*BROKEN, ValueError)
"""A broken connection or stream, or nonsense on it. Any other exception is our defect: not
caught."""

READ_BYTES = 1 << 20
"""Bytes read from a stream at once."""


class Libp2pBytes:
    """A `ByteStream` over a libp2p stream."""

    def __init__(self, stream: INetStream) -> None:
        self._stream = stream
        self._read_closed = False
        self._write_closed = False

    async def read(self) -> bytes:
        try:
            return bytes(await self._stream.read(READ_BYTES))
        except StreamEOF:
            self._read_closed = True
            if self._write_closed:
                await self._forget()
            return b""
        except BROKEN_STREAM as error:
            raise StreamError(f"the connection broke ({type(error).__name__})") from error

    async def write(self, data: bytes) -> None:
        # Shielded: half a message would garble the rest of the stream.
        with trio.move_on_after(limits.STREAM_WRITE_SECONDS, shield=True):
            try:
                await self._stream.write(data)
            except BROKEN_STREAM as error:
                raise StreamError(f"the connection broke ({type(error).__name__})") from error
            return
        await self.reset()
        raise StreamError(f"nothing could be sent for {limits.STREAM_WRITE_SECONDS:g} s")

    async def close_write(self) -> None:
        self._write_closed = True
        try:
            await self._stream.close_write()
        except BROKEN_STREAM as error:
            raise StreamError(f"the connection broke ({type(error).__name__})") from error
        if self._read_closed:
            await self._forget()

    async def reset(self) -> None:
        with trio.move_on_after(limits.STREAM_WRITE_SECONDS, shield=True):
            try:
                await self._stream.reset()
            except BROKEN_STREAM as error:
                log.debug("resetting a stream: %r", error)

    async def _forget(self) -> None:
        """Drop libp2p's entry of a stream that has ended; libp2p itself keeps it."""
        with trio.move_on_after(limits.STREAM_WRITE_SECONDS, shield=True):
            await self._stream.remove()
