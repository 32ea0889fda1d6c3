"""The alarms of a run that is watched from outside."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from swarm.events import Lines
from swarm.look.alarms.board import Alarm, Board, worst_first
from swarm.look.alarms.from_run import FromRun
from swarm.look.alarms.ringing import telling
from swarm.look.dashboard.snapshot import Snapshot
from swarm.node.node import Node
from swarm.settings import AlarmSettings


@asynccontextmanager
async def watching(
    settings: AlarmSettings, node: Node, run_id: str
) -> AsyncIterator[Callable[[Snapshot], Snapshot]]:
    """Raise the alarms of a run inside the block, from the snapshots that go through the result.

    The result adds the alarms that are raised to a snapshot. They also go to standard error, since
    a node that looks on shows no events.
    """
    lines = Lines()
    node.events.add_sink(lambda event: lines(event) if event.name.startswith("alarm.") else None)
    async with telling(settings, node, run_id) as board:
        signs = FromRun(board, settings)

        def amend(snapshot: Snapshot) -> Snapshot:
            signs.read(snapshot, node.world.now())
            return _with_alarms(snapshot, board.active)

        yield amend


def peers_page(settings: AlarmSettings, node: Node, own: Board) -> Callable[[Snapshot], Snapshot]:
    """Return what adds alarms to the snapshots of a peer's own page: the peer's, and the run's.

    The run's are on the page alone. A peer's alarms are sent from what the peer itself sees.
    """
    seen = Board(node.world.now, node.world.wall_time)
    signs = FromRun(seen, settings)

    def amend(snapshot: Snapshot) -> Snapshot:
        signs.read(snapshot, node.world.now())
        by_name = {each.name: each for each in (*seen.active, *own.active)}
        return _with_alarms(snapshot, worst_first(by_name.values()))

    return amend


def _with_alarms(snapshot: Snapshot, alarms: list[Alarm]) -> Snapshot:
    head = msgspec.structs.replace(snapshot.head, alarms=alarms)
    return msgspec.structs.replace(snapshot, head=head)
