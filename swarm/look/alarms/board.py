"""The board of alarms: signs raise them, quiet clears them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

from swarm.look.alarms.catalogue import CATALOGUE, Severity
from swarm.sentences import numbered
from swarm.terminal.untrusted import printable

State = Literal["raised", "cleared"]


class Alarm(msgspec.Struct, frozen=True):
    """One alarm that is raised now. All text is one printable line."""

    name: str
    severity: Severity
    sentence: str
    since: float
    """Wall time at which it was raised."""
    do: str
    """What a person can do."""


class Board:
    """Raises and clears the alarms of the catalogue, each at most once at a time.

    An alarm is raised once its kind's number of signs has come within a time, and cleared when no
    sign has come for another time, or when `well` proves that the cause is gone. So a figure that
    swings about its limit does not ring again and again.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        wall: Callable[[], float],
        changed: Callable[[Alarm, State], None],
    ) -> None:
        """`clock` gives seconds that only grow, `wall` the wall time; `changed` must not block."""
        self._clock = clock
        self._wall = wall
        self._changed = changed
        self._signs: dict[str, deque[float]] = {
            name: deque(maxlen=kind.signs) for name, kind in CATALOGUE.items()
        }
        self._active: dict[str, Alarm] = {}

    def now(self) -> float:
        """Seconds of the clock that only grows."""
        return self._clock()

    @property
    def active(self) -> list[Alarm]:
        """Alarms that are raised now, the worst first, then the oldest."""
        return sorted(
            self._active.values(), key=lambda each: (each.severity != "page", each.since, each.name)
        )

    def sign(self, name: str, sentence: str) -> None:
        """Count one sign of an alarm, which may raise it; a raised one takes the new sentence."""
        kind, now = CATALOGUE[name], self._clock()
        signs = self._signs[name]
        signs.append(now)
        held = self._active.get(name)
        enough = len(signs) == kind.signs and now - signs[0] <= kind.within_seconds
        if held is None and not enough:
            return
        since = held.since if held else self._wall()
        shown = printable(numbered(sentence))
        self._active[name] = Alarm(name, kind.severity, shown, since, kind.do)
        if held is None:
            self._changed(self._active[name], "raised")

    def well(self, name: str) -> None:
        """Clear an alarm: something has proved that its cause is gone."""
        self._signs[name].clear()
        held = self._active.pop(name, None)
        if held is not None:
            self._changed(held, "cleared")

    def settle(self) -> None:
        """Clear the alarms without a sign for their quiet time. Called now and then."""
        now = self._clock()
        for name in list(self._active):
            if now - self._signs[name][-1] >= CATALOGUE[name].quiet_seconds:
                self.well(name)
