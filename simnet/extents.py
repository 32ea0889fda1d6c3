"""Content of simulated files: real bytes, and symbols, which exist in name only; pieces of it."""

import bisect
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import trio
from blake3 import blake3

from swarm.rollouts.seeds import digest as digest_of
from swarm.world import Piece
from swarm.world.disk import LocalPiece


class Symbol(NamedTuple):
    """`size_bytes` of the content called `name`, from `start` on."""

    name: str
    start: int
    size_bytes: int

    def part(self, start: int, end: int) -> "Symbol":
        return Symbol(self.name, self.start + start, end - start)

    def digest(self) -> bytes:
        """Stand-in for the BLAKE3-256 of these bytes."""
        return _digest(self)


@functools.lru_cache(maxsize=8192)  # all peers hash the same pieces
def _digest(symbol: Symbol) -> bytes:
    numbers = (symbol.start.to_bytes(8, "big"), symbol.size_bytes.to_bytes(8, "big"))
    return digest_of("simnet/1/symbol", symbol.name.encode(), *numbers)


Content = bytes | Symbol


def size_of(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else content.size_bytes


def part_of(content: Content, start: int, end: int) -> Content:
    return content[start:end] if isinstance(content, bytes) else content.part(start, end)


class Extents:
    """The content of a file by offset; ranges never written read as zeros."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._contents: list[Content] = []

    def copy(self) -> "Extents":
        other = Extents()
        other._starts, other._contents = self._starts.copy(), self._contents.copy()
        return other

    def put(self, start: int, content: Content) -> None:
        """Write `content` at `start`, over any older content."""
        end = start + size_of(content)
        if end == start:
            return
        first = bisect.bisect_right(self._starts, start) - 1
        if first < 0 or self._starts[first] + size_of(self._contents[first]) <= start:
            first += 1
        last = bisect.bisect_left(self._starts, end)
        pieces: list[tuple[int, Content]] = [(start, content)]
        if first < last:
            left, right = self._starts[first], self._starts[last - 1]
            if left < start:
                pieces.insert(0, (left, part_of(self._contents[first], 0, start - left)))
            rest = self._contents[last - 1]
            if right + size_of(rest) > end:
                pieces.append((end, part_of(rest, end - right, size_of(rest))))
        # Adjacent ranges of one symbol are merged: a whole checkpoint is a single extent.
        if first > 0:
            first -= 1
            pieces.insert(0, (self._starts[first], self._contents[first]))
        if last < len(self._starts):
            pieces.append((self._starts[last], self._contents[last]))
            last += 1
        merged = [pieces[0]]
        for offset, piece in pieces[1:]:
            before, held = merged[-1]
            if (
                isinstance(held, Symbol)
                and isinstance(piece, Symbol)
                and held.name == piece.name
                and before + held.size_bytes == offset
                and held.start + held.size_bytes == piece.start
            ):
                merged[-1] = (
                    before,
                    Symbol(held.name, held.start, held.size_bytes + size_of(piece)),
                )
            else:
                merged.append((offset, piece))
        self._starts[first:last] = [offset for offset, _ in merged]
        self._contents[first:last] = [piece for _, piece in merged]

    def get(self, start: int, end: int) -> list[tuple[int, Content]]:
        """(offset, content) of the written parts of a range, cut to the range."""
        found = []
        index = max(0, bisect.bisect_right(self._starts, start) - 1)
        while index < len(self._starts) and self._starts[index] < end:
            offset, content = self._starts[index], self._contents[index]
            from_, to = max(start, offset), min(end, offset + size_of(content))
            if from_ < to:
                found.append((from_, part_of(content, from_ - offset, to - offset)))
            index += 1
        return found

    def cut(self, size_bytes: int) -> None:
        kept = self.get(0, size_bytes)
        self._starts = [offset for offset, _ in kept]
        self._contents = [content for _, content in kept]


class SimulatedSink:
    """A range of a file. Data is written in place, as on the real disk."""

    def __init__(
        self, put: Callable[[str, int, Content], None], path: str, offset: int, size_bytes: int
    ) -> None:
        self.size_bytes = size_bytes
        self._put = put
        self._path = path
        self._offset = offset
        self._written = 0
        self._hasher: Any = None
        """Of bytes, from the first on: most pieces have none."""
        self._symbol: Symbol | None = None

    def write(self, data: bytes | memoryview) -> None:
        if self._hasher is None:
            self._hasher = blake3()
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
        if self._symbol is not None:
            digest = self._symbol.digest()
        else:
            digest = (self._hasher or blake3()).digest()
        return LocalPiece(self._written, digest)

    async def commit(self, piece: Piece) -> None:
        if piece.size_bytes != self.size_bytes:
            raise ValueError(
                f"{self._path}: {piece.size_bytes} bytes arrived of {self.size_bytes} announced"
            )
        await trio.lowlevel.checkpoint_if_cancelled()

    def abandon(self) -> None:
        """Do nothing: the sink holds no resources."""
