"""The alarms of a run that is watched from outside."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from swarm.app.alarms.from_run import FromRun
from swarm.app.alarms.ringing import telling
from swarm.app.dashboard.snapshot import Snapshot
from swarm.events import Lines
from swarm.node.node import Node
from swarm.settings import AlarmSettings


@asynccontextmanager
async def watching(
    settings: AlarmSettings, node: Node, run_id: str
) -> AsyncIterator[Callable[[Snapshot], Snapshot]]:
    """Raise the alarms of a run inside the block, from the snapshots that go through the result.

    The result adds the alarms that are raised to a snapshot's problems. They also go to standard
    error, since a node that looks on shows no events.
    """
    lines = Lines()
    node.events.add_sink(lambda event: lines(event) if event.name.startswith("alarm.") else None)
    async with telling(settings, node, run_id) as board:
        signs = FromRun(board, settings)

        def amend(snapshot: Snapshot) -> Snapshot:
            signs.read(snapshot, node.world.now())
            shown = [f"Alarm {each.name}: {each.sentence}" for each in board.active]
            problems = list(dict.fromkeys([*shown, *snapshot.head.problems]))
            head = msgspec.structs.replace(snapshot.head, problems=problems)
            return msgspec.structs.replace(snapshot, head=head)

        yield amend
