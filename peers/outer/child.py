"""The role's client of the child process that trains and merges. Folders are on the peer's disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peers.outer.artifacts import FOLDER
from peers.outer.settings import ReplicaSettings
from swarm.jobs.outer import (
    CheckState,
    Contributed,
    ExportState,
    FirstState,
    InspectContribution,
    MeasureState,
    Merged,
    MergeRound,
    OuterService,
    OuterState,
    ReplicaStarted,
    RoundTrained,
    StartReplica,
    TrainRound,
)
from swarm.wire.manifest import RunManifest
from swarm.world import Disk

SERVICE = "peers.outer.learning.service:open_service"
START_DEADLINE_SECONDS = 600.0
"""Time for the child to import torch."""


@dataclass(eq=False)
class ReplicaChild:
    """Calls `OuterService`, whose jobs say what each call does."""

    service: OuterService
    disk: Disk
    settings: ReplicaSettings

    async def start(self, manifest: RunManifest, trainer: str) -> ReplicaStarted:
        job = StartReplica(
            model=self.settings.model,
            trainer=trainer,
            seed=self.settings.seed,
            inner=self.settings.inner(manifest.optimiser),
            inner_steps=manifest.outer.inner_steps,
            rounds=manifest.outer.rounds,
            trainers=tuple(manifest.trainer_ids()),
            compression=manifest.outer.compression,
            dtype=self.settings.dtype,
            folder=self._local(FOLDER),
        )
        return await self.service.start(job)

    async def first_state(self, folder: str) -> OuterState:
        return await self.service.first_state(FirstState(folder=self._local(folder)))

    async def check_state(self, folder: str) -> OuterState:
        return await self.service.check_state(CheckState(folder=self._local(folder)))

    async def train(
        self, round: int, *, state: str, inner_before: str, inner_after: str, contribution: str
    ) -> RoundTrained:
        job = TrainRound(
            round=round,
            state=self._local(state),
            inner_before=self._local(inner_before) if inner_before else "",
            inner_after=self._local(inner_after),
            contribution=self._local(contribution),
        )
        return await self.service.train(job)

    async def inspect(self, contribution: str) -> str:
        """Return in one sentence what is wrong with a contribution; empty if nothing is."""
        job = InspectContribution(contribution=self._local(contribution))
        return await self.service.inspect(job)

    async def merge(
        self,
        state: str,
        contributions: Sequence[tuple[str, str, int]],
        manifest: RunManifest,
        folder: str,
    ) -> Merged:
        """`contributions`: trainer, folder and tokens of each."""
        job = MergeRound(
            state=self._local(state),
            contributions=[
                Contributed(trainer=trainer, folder=self._local(files), tokens=tokens)
                for trainer, files, tokens in contributions
            ],
            momentum=manifest.outer.momentum,
            learning_rate=manifest.outer.learning_rate,
            folder=self._local(folder),
        )
        return await self.service.merge(job)

    async def measure(self, state: str) -> float | None:
        """Return the loss of an outer state on the sequences held back; None: there are none."""
        return await self.service.measure(MeasureState(state=self._local(state)))

    async def export(self, state: str, folder: str) -> None:
        await self.service.export_state(
            ExportState(state=self._local(state), folder=self._local(folder))
        )

    async def end(self) -> None:
        """End the other ranks: there are no more inner steps."""
        await self.service.end()

    def _local(self, path: str) -> str:
        return str(self.disk.local_path(path))
