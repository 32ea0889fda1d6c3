"""Everything that is on its way, in one heap, done when its virtual time comes."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf

import trio


class Timeline:
    """Actions by (time, name of what they belong to, number): ties never depend on chance or on
    the order of insertion. Each name must number its own actions upwards."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, int, Callable[[], None]]] = []
        self._waiting: trio.CancelScope | None = None
        self.done = 0
        """Actions done so far."""

    def at(self, time: float, name: str, number: int, action: Callable[[], None]) -> None:
        """Call `action()` at `time` (at once in a task of its own if that is past)."""
        heapq.heappush(self._heap, (time, name, number, action))
        if self._waiting is not None and time < self._waiting.deadline:
            self._waiting.deadline = time

    async def run(self) -> None:
        """Do what is due, until cancelled."""
        heap = self._heap
        while True:
            now = trio.current_time()
            while heap and heap[0][0] <= now:
                self.done += 1
                heapq.heappop(heap)[3]()
            deadline = heap[0][0] if heap else inf
            with trio.CancelScope(deadline=deadline) as self._waiting:
                await trio.sleep_forever()
            self._waiting = None
