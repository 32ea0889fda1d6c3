"""Starting a compute child again after it died: soon, loudly, and a bounded number of times."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from swarm.events import Events
from swarm.world import ChildDied

DEATHS_MAX = 5
"""Deaths in a row after which a child is not started again: the peer stops and says why."""

PAUSE_SECONDS = 0.2
"""Before a dead child is started again, four times as long after each death in a row: 0.2 to
12.8 s."""


class Restarts:
    """Deaths of one child in a row. Only a success in between forgives them, so that a child
    that one and the same input kills does not live and die for ever."""

    def __init__(self, events: Events, name: str) -> None:
        """`name`: the child's, as given to `Compute.child`."""
        self._events = events
        self._name = name
        self._deaths = 0

    def succeeded(self) -> None:
        """Forgive the deaths so far: the child has done its work since, or was not to blame."""
        self._deaths = 0

    async def run(self, life: Callable[[], Awaitable[None]]) -> None:
        """Await `life`, which starts the child and uses it, and again each time the child dies.

        Raises `ChildDied` after `DEATHS_MAX` deaths in a row.
        """
        while True:
            try:
                return await life()
            except ChildDied as error:
                self._deaths += 1
                if error.child != self._name or self._deaths >= DEATHS_MAX:
                    raise
            await trio.sleep(PAUSE_SECONDS * 4 ** (self._deaths - 1))
            self._events.emit(
                "compute.child_restarted",
                name=self._name,
                deaths=self._deaths,
                of=DEATHS_MAX,
            )
