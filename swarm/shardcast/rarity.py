"""How many neighbours have each piece, as bit-sliced counters.

Plane b is an integer whose bit i is bit b of the count of piece i. Adding a neighbour's pieces is
a ripple carry over the planes, and the rarest pieces of a set come from one pass over them, so
both cost a few operations on integers whatever the number of pieces.
"""

from __future__ import annotations

from random import Random


class Rarity:
    """Counts of pieces, up to any number of neighbours."""

    __slots__ = ("_planes",)

    def __init__(self) -> None:
        self._planes: list[int] = []

    def add(self, pieces: int) -> None:
        """One more neighbour has each of these pieces (bit i is piece i)."""
        planes = self._planes
        for number, plane in enumerate(planes):
            if not pieces:
                return
            planes[number] = plane ^ pieces
            pieces &= plane
        if pieces:
            planes.append(pieces)

    def remove(self, pieces: int) -> None:
        """One neighbour less has each of these pieces; each was added before."""
        planes = self._planes
        for number, plane in enumerate(planes):
            if not pieces:
                return
            planes[number] = plane ^ pieces
            pieces &= ~plane

    def empty(self) -> bool:
        """Whether nobody has any piece."""
        return not any(self._planes)

    def rarest(self, pieces: int) -> int:
        """Those of some pieces that fewest neighbours have."""
        for plane in reversed(self._planes):
            without = pieces & ~plane
            if without:
                pieces = without
        return pieces


def draw(pieces: int, chance: Random) -> int:
    """The index of one of some pieces (not none of them), drawn at random."""
    start = int(chance.random() * pieces.bit_length())
    above = pieces >> start
    if above:
        return start + ((above & -above).bit_length() - 1)
    return (pieces & -pieces).bit_length() - 1


def bits_of(there: bytes | bytearray) -> int:
    """One byte a piece, 0 or 1, as an integer with one bit a piece."""
    if not there:
        return 0
    return int(bytes(there).translate(_TO_DIGIT)[::-1], 2)


_TO_DIGIT = bytes([48, *[49] * 255])
