"""Counters of how many neighbours have each piece, bit-sliced.

Plane b is an integer whose bit i is bit b of the count of piece i. Adding a neighbour's pieces is
a ripple carry over the planes, and one pass finds the rarest: a few operations on integers."""

from random import Random


class Rarity:
    """For each piece, the number of neighbours that have it."""

    __slots__ = ("_planes",)

    def __init__(self) -> None:
        self._planes: list[int] = []

    def add(self, pieces: int) -> None:
        """Count one more neighbour for each of these pieces (bit i is piece i)."""
        planes = self._planes
        for number, plane in enumerate(planes):
            if not pieces:
                return
            planes[number] = plane ^ pieces
            pieces &= plane
        if pieces:
            planes.append(pieces)

    def remove(self, pieces: int) -> None:
        """Count one neighbour less for each of these pieces; each was added before."""
        planes = self._planes
        for number, plane in enumerate(planes):
            if not pieces:
                return
            planes[number] = plane ^ pieces
            pieces &= ~plane

    def empty(self) -> bool:
        return not any(self._planes)

    def rarest(self, pieces: int) -> int:
        """The subset of `pieces` that fewest neighbours have."""
        for plane in reversed(self._planes):
            without = pieces & ~plane
            if without:
                pieces = without
        return pieces


def draw(pieces: int, chance: Random) -> int:
    """Draw the index of one of `pieces` (not empty) at random."""
    start = int(chance.random() * pieces.bit_length())
    above = pieces >> start
    if above:
        return start + ((above & -above).bit_length() - 1)
    return (pieces & -pieces).bit_length() - 1


def bits_of(there: bytes | bytearray) -> int:
    """Convert one byte per piece, 0 or 1, to an integer with one bit per piece."""
    return int(bytes(there).translate(_TO_DIGIT)[::-1], 2) if there else 0


_TO_DIGIT = bytes([48, *[49] * 255])
