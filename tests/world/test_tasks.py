"""Tasks: the first error is raised as it is, however deep it was raised."""

from __future__ import annotations

import pytest
import trio

from swarm.world import ChildDied
from swarm.world.tasks import open_guarded


async def test_a_childs_death_within_a_tasks_own_nursery_is_a_childs_death() -> None:
    """Or the child would not be started again: callers treat this one error specially."""

    async def die() -> None:
        raise ChildDied("replica was killed by SIGKILL", "replica")

    async def work() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(die)
            await trio.sleep_forever()

    with pytest.raises(ChildDied, match="SIGKILL"):
        async with open_guarded() as tasks:
            tasks.start_soon(work)
            await trio.sleep_forever()
