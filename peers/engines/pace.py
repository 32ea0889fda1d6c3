"""How many rows to generate at once: as many as there may be, or half, whichever is faster.

More rows share one reading of the weights, until the caches or the arithmetic bound a step; then
further rows only make every step longer.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

WINDOW = 16
"""Steps measured with each number. Contexts grow by as many tokens meanwhile, too few to matter."""


class Pace:
    """Measures steps with half of the slots, then with all, and keeps the better number.

    Half comes first: to go up costs nothing, and to go down waits for rows to end. Only steps in
    which every slot samples and no prompt is computed count, so an engine that never has so many
    rows never decides, and takes all.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = perf_counter) -> None:
        self.slots = max(1, slots // 2)
        """Rows to generate at once."""
        self.clock = clock
        self._most = slots
        self._speeds: list[float] = []
        """Tokens per second with each number measured so far."""
        self._seconds: list[float] = []

    def note(self, rows: int, seconds: float) -> None:
        """Take note of a step that sampled for `rows` rows and computed no prompt."""
        if rows != self.slots or len(self._speeds) == 2:
            return
        self._seconds.append(seconds)
        if len(self._seconds) < WINDOW:
            return
        self._speeds.append(rows / max(median(self._seconds), 1e-9))
        self._seconds.clear()
        if len(self._speeds) == 1:
            self.slots = self._most
        elif self._speeds[0] >= self._speeds[1]:
            self.slots = max(1, self._most // 2)


class Fixed(Pace):
    """The number of slots that a setting names."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.slots = slots

    def note(self, rows: int, seconds: float) -> None:
        return
