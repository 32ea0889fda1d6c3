"""Training states on disk: written after every step; old ones are deleted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from peers.trainer.child import TrainerChild
from peers.trainer.progress import Progress
from peers.trainer.settings import TrainerSettings
from swarm.world import Disk

STATES = "trainer/states"
ANCHORS_KEPT = 3
"""Older states kept, `ANCHORS_EVERY` steps apart, as targets of a rollback."""
ANCHORS_EVERY = 10
"""Default steps between those states, where `alarm_action` is rollback."""


class State(NamedTuple):
    """A training state, complete on disk."""

    lineage: int
    step: int

    @property
    def folder(self) -> str:
        return f"{STATES}/{self.lineage}-{self.step}"


@dataclass(eq=False)
class SavedStates:
    """The newest states, and a few older ones to roll back to."""

    disk: Disk
    settings: TrainerSettings
    progress: Progress

    def all(self) -> list[State]:
        """Complete states, oldest first."""
        parts = [name.split("-") for name in self.disk.list(STATES)]
        return sorted(
            State(int(part[0]), int(part[1]))
            for part in parts
            if len(part) == 2 and part[0].isdigit() and part[1].isdigit()
        )

    async def begin(self, child: TrainerChild, step: int) -> None:
        """Begin to write the state after step `step - 1`, with its list of consumed submissions."""
        await child.begin_save(State(self.progress.lineage, step).folder)

    async def finish(self, child: TrainerChild) -> None:
        """Wait until that state is durable, then delete old ones. Announce nothing before."""
        await child.finish_save()
        older = self.all()[: -self.settings.states_kept]
        every = self.settings.states_every
        if not every and self.settings.alarm_action == "rollback":
            every = ANCHORS_EVERY
        anchors = [state for state in older if every and state.step % every == 0][-ANCHORS_KEPT:]
        for state in older:
            if state not in anchors:
                await self.disk.remove(state.folder)
