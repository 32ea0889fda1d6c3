"""The queue between the engine, whose episodes wait for an environment peer, and the role."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import trio

from swarm.jobs.inference import AskedTurn
from swarm.rollouts.rollout import Segment

TURNS_SECONDS = 60.0
"""Longest wait of a call for turns that were asked for."""


class AskedQueue:
    """Turns that episodes ask for, in the job thread, and the role takes, in trio's."""

    def __init__(self) -> None:
        self._asked: deque[AskedTurn] = deque()
        self._news = trio.Event()

    def asking(self, seed: bytes) -> Callable[[int, Sequence[Segment]], None]:
        """A function for `peers.engines.episodes.ServedTask.ask`, for worker threads."""

        def ask(row: int, segments: Sequence[Segment]) -> None:
            tokens = [list(segment.tokens) for segment in segments]
            self._asked.append(AskedTurn(seed=seed, row=row, segments=tokens))
            trio.from_thread.run_sync(self._wake)

        return ask

    def _wake(self) -> None:
        self._news.set()

    async def take(self) -> list[AskedTurn]:
        """All turns asked for since the last call; waits for one, at most `TURNS_SECONDS`."""
        with trio.move_on_after(TURNS_SECONDS):
            while not self._asked:
                self._news = trio.Event()
                if not self._asked:
                    await self._news.wait()
        return [self._asked.popleft() for _ in range(len(self._asked))]
