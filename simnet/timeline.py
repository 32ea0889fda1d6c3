"""The timeline: all pending actions in one heap, run when their virtual time comes."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf
from typing import Any

import trio

from simnet.clock import virtual_clock

Action = Callable[..., object]

_NAMED, _LINK = 0, 1


class Timeline:
    """Actions ordered by (time, name or link, number).

    Ties never depend on chance or on the order of insertion. Each name, and each link, must number
    its own actions in ascending order.
    """

    def __init__(self) -> None:
        # (time, _NAMED or _LINK, name or link, number, action, arguments)
        self._heap: list[tuple[float, int, Any, int, Action, tuple[Any, ...]]] = []
        self.done = 0
        """Number of actions run so far."""

    def at(self, time: float, name: str, number: int, action: Action, *args: Any) -> None:
        """Call `action(*args)` at `time`, or as soon as no task can run if that is past."""
        heapq.heappush(self._heap, (time, _NAMED, name, number, action, args))

    def at_link(self, time: float, link: int, number: int, action: Action, *args: Any) -> None:
        """`at` for a link of the network; at equal times links come after names."""
        heapq.heappush(self._heap, (time, _LINK, link, number, action, args))

    def next_time(self) -> float:
        """Time of the next action; inf when there is none."""
        return self._heap[0][0] if self._heap else inf

    def do_due(self, now: float) -> None:
        """Run due actions, outside any task: actions wake tasks, start them, and never wait."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            self.done += 1
            _, _, _, _, action, args = heapq.heappop(heap)
            action(*args)

    async def run(self) -> None:
        """Let the simulation's clock run due actions, until cancelled."""
        clock = virtual_clock()
        if clock.timeline is not None:
            raise RuntimeError("this simulation has a timeline already")
        clock.timeline = self
        try:
            await trio.sleep_forever()
        finally:
            clock.timeline = None
