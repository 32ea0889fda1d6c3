"""A look at every row of a data set: of which can no rollout be made, and why?"""

import time
from collections.abc import Callable
from dataclasses import replace

from peers.environments.interface import Environment, UnusableTask
from peers.environments.play import indexed_tasks
from peers.environments.prompt_room import PromptRoom
from peers.environments.tasks import Indexed
from swarm.jobs.evaluation import RowsRead

ROWS_LOOKED_AT_MAX = 10_000
"""Rows that `first_rows` looks at, for some seconds."""

Show = Callable[[int, int], None]
"""Hears of (rows rendered, all rows)."""


def read_rows(
    tasks: Indexed, room: PromptRoom | None, show: Show = lambda done, total: None
) -> RowsRead:
    """Make each of the tasks, and render it if there is a `room`."""
    found, started = RowsRead(rows=tasks.count), time.monotonic()
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
            found.faults += not where
            if len(found.unusable) < ROWS_LOOKED_AT_MAX:
                found.unusable.append(f"{where}{error}")
    found.seconds = time.monotonic() - started
    return found


def first_rows(environment: Environment, room: PromptRoom | None) -> RowsRead | None:
    if (tasks := indexed_tasks(environment)) is None:
        return None
    return read_rows(replace(tasks, count=min(tasks.count, ROWS_LOOKED_AT_MAX)), room)
