"""The alarms of a running peer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from swarm.events import Event
from swarm.look.alarms.board import Alarm, Board, State
from swarm.look.alarms.delivery import Delivery
from swarm.look.alarms.from_events import FromEvents
from swarm.look.alarms.settings import check
from swarm.node.node import Node
from swarm.settings import AlarmSettings

LOOK_SECONDS = 30.0
"""Interval at which disk and quiet times are looked at."""


@asynccontextmanager
async def telling(settings: AlarmSettings, node: Node, run_id: str = "") -> AsyncIterator[Board]:
    """Run a board whose alarms go to the log, and to the webhook and command of `settings`."""
    check(settings)
    board = Board(node.world.now, node.world.wall_time)

    def log(alarm: Alarm, state: State) -> None:
        if state != "repeated":
            node.events.emit(
                f"alarm.{state}",
                alarm=alarm.name,
                severity=alarm.severity,
                sentence=alarm.sentence,
                do=alarm.do,
            )

    board.changed.append(log)
    delivery = Delivery(settings, board, node.events.emit, node.peer_id)
    delivery.run_id = run_id

    def note_run(event: Event) -> None:
        if event.name == "peer.run_found":
            delivery.run_id = event.fields["run"]

    node.events.add_sink(note_run)
    async with trio.open_nursery() as nursery:
        if delivery.wanted:
            nursery.start_soon(delivery.run)
        yield board
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def ringing(settings: AlarmSettings, node: Node) -> AsyncIterator[Board]:
    """Raise the alarms of a peer inside the block, from its events and its disk."""
    async with telling(settings, node) as board, trio.open_nursery() as nursery:
        signs = FromEvents(board, settings, node.settings.home_path)
        node.events.add_sink(signs)
        nursery.start_soon(_look, board, signs, node)
        yield board
        nursery.cancel_scope.cancel()


async def _look(board: Board, signs: FromEvents, node: Node) -> None:
    while True:
        await trio.sleep(LOOK_SECONDS)
        signs.look()
        board.settle()
