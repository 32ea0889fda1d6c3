"""Restarting a compute child that died: soon, with an event, and a limited number of times."""

from collections.abc import Awaitable, Callable

import trio

from swarm.events import Events
from swarm.world import ChildDied

DEATHS_MAX = 5
"""Deaths in a row after which a child is not started again: the peer stops and reports why."""

PAUSE_SECONDS = 0.2
"""Pause before a child's first restart, times four after each death in a row: 0.2 to 12.8 s."""


class Restarts:
    """Restarts one child and counts its deaths in a row. Only a success resets the count, so that
    a child that the same input kills every time is not restarted for ever."""

    def __init__(self, events: Events, name: str) -> None:
        """`name`: the child's name, as given to `Compute.child`."""
        self._events = events
        self._name = name
        self._deaths = 0

    def succeeded(self) -> None:
        """Reset the count of deaths: the child has done its work, or did not cause its death."""
        self._deaths = 0

    async def run(self, life: Callable[[], Awaitable[None]]) -> None:
        """Await `life` again after each death. Raises `ChildDied` after `DEATHS_MAX` in a row."""
        while True:
            try:
                return await life()
            except ChildDied as error:
                self._deaths += 1
                if error.child != self._name or self._deaths >= DEATHS_MAX:
                    raise
            await trio.sleep(PAUSE_SECONDS * 4 ** (self._deaths - 1))
            self._events.emit(
                "compute.child_restarted", name=self._name, deaths=self._deaths, of=DEATHS_MAX
            )
