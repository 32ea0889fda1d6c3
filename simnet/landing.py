"""Pieces that arrive on a simulated disk."""

from __future__ import annotations

from collections.abc import Callable

import trio
from blake3 import blake3

from simnet.extents import Content, Symbol, size_of
from swarm.world import Piece


class SimulatedPiece:
    """A piece that arrived; only its size and digest are kept."""

    def __init__(self, size_bytes: int, digest: bytes) -> None:
        self.size_bytes = size_bytes
        self._digest = digest

    def verify(self, digest: bytes) -> bool:
        return self._digest == digest


class SimulatedSink:
    """A range of a file. Data is written in place, as on the real disk."""

    def __init__(
        self,
        put: Callable[[str, int, Content], None],
        path: str,
        offset: int,
        size_bytes: int,
    ) -> None:
        self.size_bytes = size_bytes
        self._put = put
        self._path = path
        self._offset = offset
        self._written = 0
        self._hasher = blake3()
        self._symbol: Symbol | None = None

    def write(self, data: bytes | memoryview) -> None:
        self._hasher.update(data)
        self._land(bytes(data))

    def land(self, symbol: Symbol) -> None:
        """Write a whole piece that has no bytes."""
        self._land(symbol)
        self._symbol = symbol

    def _land(self, content: Content) -> None:
        if self._symbol is not None or self._written + size_of(content) > self.size_bytes:
            raise ValueError(
                f"{self._path}: more than the {self.size_bytes} bytes announced arrived"
            )
        self._put(self._path, self._offset + self._written, content)
        self._written += size_of(content)

    def finish(self) -> Piece:
        digest = self._hasher.digest() if self._symbol is None else self._symbol.digest()
        return SimulatedPiece(self._written, digest)

    async def commit(self, piece: Piece) -> None:
        if piece.size_bytes != self.size_bytes:
            raise ValueError(
                f"{self._path}: {piece.size_bytes} bytes arrived of {self.size_bytes} announced"
            )
        await trio.lowlevel.checkpoint_if_cancelled()

    def abandon(self) -> None:
        """Do nothing: the sink holds no resources."""
