"""A look at every row of a data set: of which can no rollout be made, and why?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from peers.environments.interface import Environment, UnusableTask
from peers.environments.play import indexed_tasks
from peers.environments.prompt_room import PromptRoom
from peers.environments.tasks import Indexed

UNUSABLE_SHOWN = 20
"""Unusable rows that are named one by one."""

ROWS_LOOKED_AT_MAX = 10_000
"""Rows that `unusable_rows` looks at, for some seconds."""

Show = Callable[[int, int], None]
"""Hears of (rows rendered, all rows)."""


@dataclass
class RowsRead:
    """What the rows of one environment are good for."""

    rows: int
    unusable: list[str] = field(default_factory=list)
    """A sentence for each of the first; it names the file and the row."""
    unusable_count: int = 0
    tokens_max: int = 0
    """Tokens of the longest usable prompt."""
    seconds: float = 0.0

    def counted(self, environment: str) -> str:
        """How many rows cannot be used, in words."""
        return f"{self.unusable_count:,} of {self.rows:,} rows of {environment} cannot be used"

    def listed(self) -> str:
        """The first unusable rows, a line each."""
        more = self.unusable_count - len(self.unusable)
        lines = [*self.unusable, *([f"and {more:,} more"] if more else [])]
        return "".join(f"\n  {each}" for each in lines)


def read_rows(
    tasks: Indexed, room: PromptRoom | None, show: Show = lambda done, total: None
) -> RowsRead:
    """Make each of the tasks, and render it if there is a `room`."""
    found, started = RowsRead(tasks.count), time.monotonic()
    for index in range(tasks.count):
        show(index, tasks.count)
        where = ""
        try:
            prompt = tasks.at(index).prompt
            where = f"{tasks.named(index)}: "
            if room is not None:
                found.tokens_max = max(found.tokens_max, len(room.encode(prompt)))
        except UnusableTask as error:
            found.unusable_count += 1
            if len(found.unusable) < UNUSABLE_SHOWN:
                found.unusable.append(f"{where}{error}")
    found.seconds = time.monotonic() - started
    return found


def unusable_rows(environment: Environment, room: PromptRoom | None) -> str:
    """Names the unusable ones among the first rows of an environment's data.

    Empty if there are none, or no rows.
    """
    tasks = indexed_tasks(environment)
    if tasks is None:
        return ""
    first = replace(tasks, count=min(tasks.count, ROWS_LOOKED_AT_MAX))
    found = read_rows(first, room)
    if not found.unusable_count:
        return ""
    return f"{found.counted(environment.name)}, and are passed over:{found.listed()}"
