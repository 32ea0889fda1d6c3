"""Training states on disk: written when they are due; old ones are deleted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from peers.learning.state_format import STATES
from peers.trainer.child import TrainerChild
from peers.trainer.progress import Progress
from peers.trainer.settings import TrainerSettings
from swarm.jobs.training import Snapshot
from swarm.shardcast.mirror.folder import partial_name
from swarm.wire.messages import StepOrder
from swarm.world import Disk, World
from swarm.world.observable import Observable

INHERITED = "trainer/inherited"
"""Folder of a state that this trainer, which was a standby, continues from."""
RESTORED = "trainer/restored"
"""Folder of a published policy that a trainer without a training state begins with."""
RESTORING = f"{RESTORED}.new"
"""The same before it is complete."""
UNPACKING = f"{INHERITED}.new"
"""`INHERITED` before it is complete."""
ORDER = "order"
"""File there: the step order that was newest at the trainer before."""
ANCHORS_KEPT = 3
"""Older states kept, `ANCHORS_EVERY` steps apart, as targets of a rollback."""
ANCHORS_EVERY = 10
"""Default steps between those states, where `alarm_action` is rollback."""


class State(NamedTuple):
    """A training state, complete on disk."""

    lineage: int
    step: int

    root: str = STATES

    @property
    def folder(self) -> str:
        return f"{self.root}/{self.lineage}-{self.step}"


@dataclass(eq=False)
class SavedStates:
    """The newest states, and a few older ones to roll back to."""

    disk: Disk
    world: World
    settings: TrainerSettings
    progress: Progress
    newest: int | None = None
    """Step of this lineage's newest durable state."""
    saved_at: float = 0.0
    """When it became durable, in the world's seconds."""

    changed: Observable[State | None] = field(default_factory=lambda: Observable(None))
    """The newest durable state, of this lineage or the one before it."""
    _kept: set[State] = field(default_factory=set)

    def all(self, root: str = STATES) -> list[State]:
        """Complete states in a folder, oldest first."""
        parts = [name.split("-") for name in self.disk.list(root)]
        return sorted(
            State(int(part[0]), int(part[1]), root)
            for part in parts
            if len(part) == 2 and part[0].isdigit() and part[1].isdigit()
        )

    def inherited(self) -> State | None:
        """The state of the trainer whose place this one has taken, unless a newer one is here."""
        found = self.all(INHERITED)
        own = self.all()
        return found[-1] if found and (not own or own[-1].lineage <= found[-1].lineage) else None

    def restored(self) -> State | None:
        """The published policy that stands in for a training state, if there is none."""
        found = self.all(RESTORED)
        return found[-1] if found and not self.all() and not self.all(INHERITED) else None

    async def from_policy(self, child: TrainerChild, restored: State) -> State:
        """Write the state of a child that began with a restored policy, as an inherited one."""
        state = State(restored.lineage, restored.step, INHERITED)
        await child.begin_save(state.folder, "")
        await child.finish_save()
        return state

    async def inherited_order(self) -> StepOrder | None:
        """The step order that was newest when the inherited state was bundled."""
        path = f"{INHERITED}/{ORDER}"
        if not self.disk.exists(path):
            return None
        return msgspec.msgpack.decode(await self.disk.read(path), type=StepOrder)

    async def drop_inherited(self) -> None:
        """Delete what was inherited or restored, whole or not: a state of a later lineage is
        durable, or there was nothing."""
        for folder in (INHERITED, UNPACKING, RESTORED, RESTORING, partial_name(RESTORING)):
            await self.disk.remove(folder)

    @contextmanager
    def keeping(self, state: State) -> Iterator[None]:
        """Do not delete this state inside the block."""
        self._kept.add(state)
        try:
            yield
        finally:
            self._kept.discard(state)

    def due(self, step: int) -> bool:
        """Whether the state after step `step - 1` is to be written.

        At the latest it is `save_steps` after the last one, and at the end of the run. Standbys
        are to have one every `standby_minutes`.
        """
        if self.newest is None:
            return True
        manifest = self.progress.versions.manifest_of(step)
        settings = self.settings
        limits = [settings.save_minutes or math.inf]
        if manifest.standbys:
            limits.append(settings.standby_minutes)
        return (
            step - self.newest >= settings.save_steps
            or step >= manifest.schedule.steps
            or bool(settings.states_every and step % settings.states_every == 0)
            or self.world.now() - self.saved_at >= 60 * min(limits)
        )

    def loaded(self, state: State) -> None:
        """Note that the child has loaded a state."""
        self.newest, self.saved_at = state.step, self.world.now()
        self.changed.set(state)

    async def begin(
        self,
        child: TrainerChild,
        policy: str,
        state: State | None,
        snapshot: Snapshot | None = None,
    ) -> None:
        """Begin to write the policy held to the folder `policy`, and this state and snapshot of it,
        if any."""
        await child.begin_save(state.folder if state else "", policy, snapshot)

    async def finish(self, child: TrainerChild, state: State | None) -> None:
        """Wait until they are durable, then delete old states. Announce nothing before."""
        await child.finish_save()
        if state is None:
            return
        self.newest, self.saved_at = state.step, self.world.now()
        self.changed.set(state)
        older = self.all()[: -self.settings.states_kept]
        every = self.settings.states_every
        if not every and self.settings.alarm_action == "rollback":
            every = ANCHORS_EVERY
        anchors = [state for state in older if every and state.step % every == 0][-ANCHORS_KEPT:]
        for state in older:
            if state not in anchors and state not in self._kept:
                await self.disk.remove(state.folder)
