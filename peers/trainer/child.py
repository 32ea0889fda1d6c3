"""The role's client of the trainer's child process: it fills in jobs from run and disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from peers.trainer.environments import EnvironmentFigures
from peers.trainer.pool import UNCOUNTED, Accepted
from peers.trainer.progress import FollowedVersions
from peers.trainer.settings import TrainerSettings
from swarm.jobs.memory import MemoryPlan
from swarm.jobs.training import (
    AcceptedSubmission,
    BeginSave,
    Compare,
    Evaluate,
    Evaluated,
    Export,
    Figures,
    FinishSave,
    Follow,
    PlanTraining,
    Record,
    RecordTo,
    Resume,
    RollBack,
    ScoreAhead,
    StartTraining,
    StateValue,
    Trained,
    TrainingService,
    TrainingTerms,
    TrainStep,
)
from swarm.wire.manifest import RunManifest
from swarm.world import Disk

SERVICE = "peers.trainer.service:open_service"
START_DEADLINE_SECONDS = 600.0
"""Time for the child to import torch and, under `torchrun`, to meet all other ranks."""


@dataclass(eq=False)
class TrainerChild:
    """Calls `TrainingService`, whose jobs say what each call does. Folders are paths on the peer's
    disk."""

    service: TrainingService
    disk: Disk
    settings: TrainerSettings

    async def record_to(self, run: str, manifest: RunManifest) -> int:
        """Open the records of metrics; return how many ranks train together."""
        job = RecordTo(
            tensorboard=self.settings.tensorboard,
            wandb=self.settings.wandb,
            run=run,
            terms=_training_terms(manifest),
            peak_flops=self.settings.peak_flops,
        )
        return await self.service.record_to(job)

    async def plan(self, manifest: RunManifest) -> MemoryPlan:
        return await self.service.plan(PlanTraining(start=self._start(manifest)))

    async def start(
        self, manifest: RunManifest, policy: str = "", step: int = 0, lineage: int = 0
    ) -> None:
        """Begin with the base, or with the published folder `policy` as the first one, `step`, of a
        lineage."""
        job = self._start(manifest)
        if policy:
            policy = self._local(policy)
            job = msgspec.structs.replace(job, policy=policy, step=step, lineage=lineage)
        await self.service.start(job)

    async def resume(
        self, manifest: RunManifest, state: str, policies: Mapping[int, str]
    ) -> set[bytes]:
        """Continue from a training state; return the consumed submissions that are young enough to
        be offered again. `policies`: folders of published policies, by step."""
        job = Resume(
            start=self._start(manifest), folder=self._local(state), policies=self._folders(policies)
        )
        return set((await self.service.resume(job)).consumed)

    async def roll_back(self, state: str, policies: Mapping[int, str], lineage: int) -> None:
        folder, folders = self._local(state), self._folders(policies)
        await self.service.roll_back(RollBack(folder=folder, policies=folders, lineage=lineage))

    async def follow(self, manifest: RunManifest) -> None:
        await self.service.follow(
            Follow(terms=_training_terms(manifest), environments=manifest.environments)
        )

    async def score(self, submissions: Sequence[Accepted], versions: FollowedVersions) -> None:
        """Score submissions ahead of the step that trains on them."""
        await self.service.score(ScoreAhead(submissions=self._accepted(submissions, versions)))

    async def train(
        self,
        step: int,
        batch: Sequence[Accepted],
        versions: FollowedVersions,
        values: Sequence[list[StateValue]],
    ) -> Trained:
        """`values`: [submissions] those of states in the batch, or nothing."""
        job = TrainStep(step=step, submissions=self._accepted(batch, versions), values=list(values))
        return await self.service.train(job)

    def _accepted(
        self, batch: Sequence[Accepted], versions: FollowedVersions
    ) -> list[AcceptedSubmission]:
        return [
            AcceptedSubmission(
                digest=accepted.digest,
                path=self._local(accepted.path),
                rollouts_digest=accepted.verdict.rollouts_digest,
                policy=accepted.verdict.policy,
                rewards=accepted.verdict.rewards,
                sampling=versions.manifest_of(accepted.verdict.step).sampling,
                kept=[label == "kept" for label in accepted.labels],
                ungraded=[n for n, each in enumerate(accepted.labels) if each in UNCOUNTED],
            )
            for accepted in batch
        ]

    async def begin_save(self, state: str, policy: str) -> None:
        """Write what is given of state and policy; an empty folder: not given."""
        folders = [self._local(folder) if folder else "" for folder in (state, policy)]
        await self.service.begin_save(BeginSave(state=folders[0], policy=folders[1]))

    async def finish_save(self) -> None:
        await self.service.finish_save(FinishSave())

    async def export(self, folder: str, *, base: bool = False) -> None:
        await self.service.export(Export(folder=self._local(folder), base=base))

    async def matches(self, folder: str) -> bool:
        """Whether a published policy is the one held, bit for bit."""
        return await self.service.compare(Compare(folder=self._local(folder)))

    async def record(self, step: int, figures: Figures, environments: EnvironmentFigures) -> None:
        await self.service.record(Record(step=step, figures=figures, environments=environments))

    async def evaluate(self, folder: str) -> Evaluated:
        return await self.service.evaluate(
            Evaluate(
                folder=self._local(folder), prompts=self.settings.evaluate_tasks, split="held_out"
            )
        )

    async def end(self) -> None:
        await self.service.end()

    def _start(self, manifest: RunManifest) -> StartTraining:
        """The job with which the trainer begins a run."""
        settings = self.settings
        return StartTraining(
            model=settings.model,
            terms=_training_terms(manifest),
            environments=manifest.environments,
            seed=settings.seed,
            sharding=settings.sharding,
            dtype=settings.dtype,
            attention=settings.attention,
        )

    def _folders(self, policies: Mapping[int, str]) -> dict[int, str]:
        return {step: self._local(folder) for step, folder in policies.items()}

    def _local(self, path: str) -> str:
        return str(self.disk.local_path(path))


def _training_terms(manifest: RunManifest) -> TrainingTerms:
    return TrainingTerms(
        objective=manifest.objective,
        optimiser=manifest.optimiser,
        schedule=manifest.schedule,
        sampling=manifest.sampling,
        adapter=manifest.adapter,
    )
