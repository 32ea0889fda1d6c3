"""What an environment peer remembers of episodes: states, in its child, and tokens, in its role.

Both save time alone: an episode that was forgotten is played again from the tokens in the request,
which the environment peers' own signatures cover. So whoever has most of the states makes way."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from swarm.wire.turns import TOKEN_BYTES, Turn

if TYPE_CHECKING:
    from peers.environments.episodes import Replies

Key = tuple[bytes, int, int, bytes]
"""Seed, group and sample of an episode, and the digest of its tokens up to the last turn."""


class States:
    """States by worker, the oldest of each first."""

    def __init__(self, states_max: int) -> None:
        self._states_max = states_max
        self._held: dict[str, OrderedDict[Key, Replies]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def pop(self, worker: str, key: Key) -> Replies | None:
        return self._held.get(worker, OrderedDict()).pop(key, None)

    def keep(self, worker: str, key: Key, replies: Replies) -> None:
        """Keep a state; beyond the bound, the worker with the most loses its oldest."""
        self._held.setdefault(worker, OrderedDict())[key] = replies
        if len(self) > self._states_max:
            most = max(self._held, key=lambda each: (len(self._held[each]), each))
            self._held[most].popitem(last=False)
        if not all(self._held.values()):
            self._held = {each: states for each, states in self._held.items() if states}

    def clear(self) -> None:
        self._held.clear()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, perhaps in an environment's code, whose errors are wrapped."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, MemoryError):
        cause = cause.__cause__
    return cause is not None


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
