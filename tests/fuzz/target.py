"""A fuzz target, and the inputs made for it: valid examples and damaged ones."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

CORPUS = Path(__file__).parent / "corpus"
"""Inputs kept by target: those that once found a fault, and some with coverage of their own."""

CPU_SECONDS_MAX = 1.0
"""Processor time for one input. Inputs are at most a few KiB, so a parser that takes longer has a
cost that its bounds do not limit."""

NESTED = (b"\x91" * 3000 + b"\xc0", b"[" * 3000, b'{"":' * 3000)
"""Arrays in msgpack and JSON, nested more deeply than a recursive decoder can follow."""


def with_nested_field(raw: bytes) -> list[bytes]:
    """Msgpack arrays near the start of `raw`, each with a further element that is nested deeply."""
    return [
        raw[:at] + bytes([raw[at] + 1]) + raw[at + 1 :] + NESTED[0]
        for at in range(min(8, len(raw)))
        if 0x90 <= raw[at] < 0x9F
    ]


@dataclass(frozen=True)
class Target:
    """One parser. A call parses bytes and raises only for a defect."""

    name: str
    check: Callable[[bytes], None]
    """Lets only the parser's documented exceptions pass, and checks the invariants of a result."""
    make_seeds: Callable[[], Sequence[bytes]]
    """Valid examples."""

    def __call__(self, raw: bytes) -> None:
        began = time.thread_time()
        self.check(raw)
        took = time.thread_time() - began
        assert took <= CPU_SECONDS_MAX, f"{len(raw)} bytes took {took:.1f} s"

    @functools.cached_property
    def seeds(self) -> list[bytes]:
        return list(self.make_seeds())

    def kept(self) -> list[bytes]:
        """The inputs of the kept corpus."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).glob("*"))]

    def inputs(self) -> st.SearchStrategy[bytes]:
        """Random bytes, and examples with one to six changes."""
        examples = st.sampled_from(self.seeds + self.kept())
        return st.binary(max_size=300) | examples | _damaged(examples)


@st.composite
def _damaged(draw: st.DrawFn, examples: st.SearchStrategy[bytes]) -> bytes:
    raw = bytearray(draw(examples))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(raw)))
        change = draw(st.sampled_from([_flip, _cut, _remove, _repeat, _splice, _extreme, _nest]))
        change(draw, raw, at, examples)
    return bytes(raw)


Examples = st.SearchStrategy[bytes]


def _flip(draw: st.DrawFn, raw: bytearray, at: int, examples: Examples) -> None:
    if at < len(raw):
        raw[at] ^= 1 << draw(st.integers(0, 7))


def _cut(draw: st.DrawFn, raw: bytearray, at: int, examples: Examples) -> None:
    del raw[at:]


def _remove(draw: st.DrawFn, raw: bytearray, at: int, examples: Examples) -> None:
    del raw[at : at + draw(st.integers(1, 40))]


def _repeat(draw: st.DrawFn, raw: bytearray, at: int, examples: Examples) -> None:
    raw[at:at] = raw[at : at + draw(st.integers(1, 40))] * draw(st.integers(1, 20))


def _splice(draw: st.DrawFn, raw: bytearray, at: int, examples: Examples) -> None:
    other = draw(examples)
    start = draw(st.integers(0, len(other)))
    raw[at : at + draw(st.integers(0, 40))] = other[start : start + draw(st.integers(1, 200))]


def _extreme(draw: st.DrawFn, raw: bytearray, at: int, examples: Examples) -> None:
    """Set a field of 1 to 8 bytes to an extreme value: perhaps a length."""
    size = draw(st.sampled_from([1, 2, 4, 8]))
    bits = 8 * size
    value = draw(st.sampled_from([0, 1, 2 ** (bits - 1) - 1, 2 ** (bits - 1), 2**bits - 1]))
    raw[at : at + size] = value.to_bytes(size, draw(st.sampled_from(["big", "little"])))


def _nest(draw: st.DrawFn, raw: bytearray, at: int, examples: Examples) -> None:
    raw[at:at] = draw(st.sampled_from(NESTED))
