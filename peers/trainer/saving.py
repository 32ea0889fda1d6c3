"""Training states on disk: written when they are due; old ones are deleted."""

from dataclasses import dataclass
from typing import NamedTuple

from peers.learning.state_format import STATES
from peers.trainer.progress import Progress
from peers.trainer.settings import TrainerSettings
from swarm.jobs.training import FinishSave, TrainingService
from swarm.world import Disk

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
    newest: int | None = None
    """Step of this lineage's newest durable state."""

    def all(self) -> list[State]:
        """Complete states, oldest first."""
        parts = [name.split("-") for name in self.disk.list(STATES)]
        return sorted(
            State(int(part[0]), int(part[1]))
            for part in parts
            if len(part) == 2 and part[0].isdigit() and part[1].isdigit()
        )

    def due(self, step: int) -> bool:
        """Whether to save after step `step - 1`: at least every `save_steps`, and at the end."""
        if self.newest is None:
            return True
        manifest = self.progress.versions.manifest_of(step)
        settings = self.settings
        return (
            step - self.newest >= settings.save_steps
            or step >= manifest.schedule.steps
            or bool(settings.states_every and step % settings.states_every == 0)
        )

    def loaded(self, state: State) -> None:
        """Note that the child has loaded a state."""
        self.newest = state.step

    async def finish(self, child: TrainingService, state: State | None) -> None:
        """Wait until they are durable, then delete old states. Announce nothing before."""
        await child.finish_save(FinishSave())
        if state is None:
            return
        self.newest = state.step
        older = self.all()[: -self.settings.states_kept]
        every = self.settings.states_every
        if not every and self.settings.alarm_action == "rollback":
            every = ANCHORS_EVERY
        anchors = [state for state in older if every and state.step % every == 0][-ANCHORS_KEPT:]
        for state in older:
            if state not in anchors:
                await self.disk.remove(state.folder)
