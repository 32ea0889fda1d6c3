"""The states of the episodes that an environment peer's child plays, between their turns.

They save time alone: an episode that was forgotten is played again from the tokens in the request,
which the environment peers' own signatures cover. So whoever has most of them makes way first.
"""

from __future__ import annotations

from collections import OrderedDict

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
        """Take a state out, to continue its episode."""
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
        """Forget all: their memory is needed."""
        self._held.clear()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, perhaps in an environment's code, whose errors are wrapped."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, MemoryError):
        cause = cause.__cause__
    return cause is not None
