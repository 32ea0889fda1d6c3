"""The tokens of the last episodes, which the next request need not repeat."""

from __future__ import annotations

from collections import OrderedDict

from swarm.wire.turns import TOKEN_BYTES, Turn

BYTES_MAX = 64 << 20
"""Packed tokens remembered: of 1,000 episodes of 20,000 tokens."""


class Texts:
    """Packed tokens by episode; the least recently used is forgotten."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._texts: OrderedDict[tuple[bytes, int, int], bytes] = OrderedDict()
        self._bytes = 0

    def keep(self, turn: Turn, before: bytes) -> None:
        """Remember an episode up to a turn, whose packed tokens stand after `before`."""
        key = (turn.seed, turn.group, turn.sample)
        self._bytes -= len(self._texts.pop(key, b""))
        if turn.over:
            return
        self._texts[key] = before + turn.tokens
        self._bytes += len(self._texts[key])
        while self._bytes > self._bytes_max:
            _, forgotten = self._texts.popitem(last=False)
            self._bytes -= len(forgotten)

    def beginning(self, seed: bytes, group: int, sample: int, tokens: int) -> bytes | None:
        """An episode's first tokens, packed; None if they are not remembered."""
        found = self._texts.get((seed, group, sample), b"")
        return found[: tokens * TOKEN_BYTES] if len(found) >= tokens * TOKEN_BYTES else None
