"""The board of alarms: signs raise them, quiet clears them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

from swarm.look.alarms.catalogue import CATALOGUE
from swarm.sentences import numbered
from swarm.terminal.untrusted import printable

State = Literal["raised", "cleared"]


class Board:
    """Raises and clears the alarms of the catalogue, each at most once at a time.

    An alarm is raised once its kind's number of signs has come within a time, and cleared when no
    sign has come for another time, or when `well` proves that the cause is gone. So a figure that
    swings about its limit does not ring again and again.
    """

    def __init__(
        self, clock: Callable[[], float], changed: Callable[[str, str, State], None]
    ) -> None:
        """`clock` gives seconds that only grow; `changed` gets an alarm's name and sentence."""
        self._clock = clock
        self._changed = changed
        self.raised: dict[str, str] = {}
        """The sentences of the alarms that are raised now, by name; printable lines."""
        self._signs: dict[str, deque[float]] = {
            name: deque(maxlen=kind.signs) for name, kind in CATALOGUE.items()
        }

    def now(self) -> float:
        """Seconds of the clock that only grows."""
        return self._clock()

    def sign(self, name: str, sentence: str) -> None:
        """Count one sign of an alarm, which may raise it; a raised one takes the new sentence."""
        kind, now = CATALOGUE[name], self._clock()
        signs = self._signs[name]
        signs.append(now)
        is_new = name not in self.raised
        enough = len(signs) == kind.signs and now - signs[0] <= kind.within_seconds
        if is_new and not enough:
            return
        self.raised[name] = printable(numbered(sentence))
        if is_new:
            self._changed(name, self.raised[name], "raised")

    def well(self, name: str) -> None:
        """Clear an alarm: something has proved that its cause is gone."""
        self._signs[name].clear()
        sentence = self.raised.pop(name, None)
        if sentence is not None:
            self._changed(name, sentence, "cleared")

    def settle(self) -> None:
        """Clear the alarms without a sign for their quiet time. Called now and then."""
        now = self._clock()
        for name in list(self.raised):
            if now - self._signs[name][-1] >= CATALOGUE[name].quiet_seconds:
                self.well(name)
