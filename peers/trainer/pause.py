"""A trainer's pause: its step stays closed and training stops until a person restarts it."""

from __future__ import annotations

from typing import NoReturn

import trio

from peers.trainer.progress import Progress
from swarm.node.run_node import RunNode

REMINDER_SECONDS = 600.0
"""Seconds between reminders of why the trainer is paused."""


class Pause:
    """Closes the open step and stops training; falsy while not paused."""

    def __init__(self, peer: RunNode, progress: Progress) -> None:
        self._peer = peer
        self._progress = progress
        self._reason = ""

    def __bool__(self) -> bool:
        return bool(self._reason)

    async def hold(self, reason: str) -> NoReturn:
        """Pause, and repeat the reason until cancelled."""
        self._reason = reason
        self._peer.status.doing = f"paused: {reason}"[:200]
        self._progress.changed.touch()
        while True:
            self._peer.node.events.emit(
                "trainer.paused", reason=reason, remedy="restart it with --resume"
            )
            await trio.sleep(REMINDER_SECONDS)
