"""The service of the trainer's child process: learns, saves, exports and evaluates."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from peers.engines.device import find_dtype, use_hardware
from peers.environments.collection import Environments, labels
from peers.trainer import metrics
from peers.trainer.evaluation import accuracy
from peers.trainer.learning.batch import informative
from peers.trainer.learning.lead import lead
from peers.trainer.learning.learner import Learner
from peers.trainer.learning.packing import why_not
from peers.trainer.learning.ranks import Ranks
from peers.trainer.learning.settings import LearnerSettings
from peers.trainer.reading import read_groups
from peers.trainer.warmup import prepare_base
from swarm.errors import UserError
from swarm.jobs import (
    Accuracy,
    BasePrepared,
    BeginSave,
    Done,
    EndTraining,
    Evaluate,
    Evaluated,
    Export,
    FinishSave,
    Follow,
    Hardware,
    PrepareBase,
    Record,
    Recording,
    RecordTo,
    Resume,
    Resumed,
    RollBack,
    StartTraining,
    Trained,
    TrainingService,
    TrainStep,
    Unreadable,
)
from swarm.world.job_thread import J, JobThread, R


def open_service(hardware: Mapping[str, Any] | None = None) -> Any:
    """Open the service of the trainer's child: a `TrainerService`, which leads the other ranks
    under `torchrun`."""
    used = msgspec.convert(hardware or Hardware(), Hardware)
    use_hardware(used)
    return lead(TrainerService, used.device)


class _LearnerThread(JobThread):
    """Collectives must come in the same order on every rank, on its own device."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._device = ranks.device

    async def run(self, work: Callable[[J], R], job: J) -> R:
        """See `JobThread.run`."""

        def on_device(job: J) -> R:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has its own
            return work(job)

        return await super().run(on_device, job)


class TrainerService:
    """Implements `TrainingService`: holds this rank's part of the learner."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or Ranks()
        self._learner: Learner | None = None
        self._metrics = metrics.Metrics()
        self._peak_flops = 0.0
        self._thread = _LearnerThread(self._ranks)

    async def start(self, job: StartTraining) -> Done:
        """See `TrainingService.start`."""
        return await self._thread.run(self._start, job)

    async def resume(self, job: Resume) -> Resumed:
        """See `swarm.jobs.Resume`."""
        return await self._thread.run(self._resume, job)

    async def follow(self, job: Follow) -> Done:
        """See `swarm.jobs.Follow`."""
        return await self._thread.run(self._follow, job)

    async def roll_back(self, job: RollBack) -> Done:
        """See `swarm.jobs.RollBack`."""
        return await self._thread.run(self._roll_back, job)

    async def record_to(self, job: RecordTo) -> Recording:
        """See `TrainingService.record_to`."""
        return await self._thread.run(self._record_to, job)

    async def record(self, job: Record) -> Done:
        """See `swarm.jobs.Record`."""
        return await self._thread.run(self._record, job)

    async def train(self, job: TrainStep) -> Trained:
        """See `swarm.jobs.TrainStep`."""
        return await self._thread.run(self._train, job)

    async def begin_save(self, job: BeginSave) -> Done:
        """See `swarm.jobs.BeginSave`."""
        return await self._thread.run(self._begin_save, job)

    async def finish_save(self, job: FinishSave) -> Done:
        """See `swarm.jobs.FinishSave`."""
        return await self._thread.run(self._finish_save, job)

    async def export(self, job: Export) -> Done:
        """See `swarm.jobs.Export`."""
        return await self._thread.run(self._export, job)

    async def evaluate(self, job: Evaluate) -> Evaluated:
        """See `swarm.jobs.Evaluate`."""
        return await self._thread.run(self._evaluate, job)

    async def prepare_base(self, job: PrepareBase) -> BasePrepared:
        """See `swarm.jobs.PrepareBase`."""
        return await self._thread.run(self._prepare_base, job)

    async def end(self, job: EndTraining) -> Done:
        """See `swarm.jobs.EndTraining`. A single process has no other ranks to end."""
        return Done()

    def _start(self, job: StartTraining) -> Done:
        self._sampling = job.lessons.sampling
        self._references = job.environments
        self._environments = Environments(job.environments)
        self._base = Path(job.model)
        settings = LearnerSettings(
            objective=job.lessons.objective,
            optimiser=job.lessons.optimiser,
            schedule=job.lessons.schedule,
            seed=job.seed,
            completion_tokens_max=self._sampling.max_new_tokens,
            sharding=msgspec.structs.replace(
                job.sharding,
                mixed_precision=find_dtype(job.dtype, self._ranks.device) == torch.bfloat16,
            ),
            attention=None if job.attention == "fastest" else job.attention,
        )
        reason = (
            ""
            if settings.attention is None
            else why_not(settings.attention, self._ranks.device, settings.sharding.mixed_precision)
        )
        if reason:
            raise UserError(f"trainer.attention: {reason}; omit it to use the fastest available")
        self._learner = Learner(self._base, settings, ranks=self._ranks)
        return Done()

    def _resume(self, job: Resume) -> Resumed:
        self._start(job.start)
        learner = self._held()
        learner.load(Path(job.folder), _paths(job.policies))
        consumed = [name for names in learner.consumed.values() for name in names]
        return Resumed(step=learner.step, consumed=[bytes.fromhex(name) for name in consumed])

    def _follow(self, job: Follow) -> Done:
        lessons = job.lessons
        self._sampling = lessons.sampling
        self._references = job.environments
        learner = self._held()
        learner.follow(
            dataclasses.replace(
                learner.settings,
                objective=lessons.objective,
                optimiser=lessons.optimiser,
                schedule=lessons.schedule,
                completion_tokens_max=lessons.sampling.max_new_tokens,
            )
        )
        return Done()

    def _roll_back(self, job: RollBack) -> Done:
        learner = self._held()
        consumed = learner.consumed
        learner.load(Path(job.folder), _paths(job.policies))
        learner.begin_lineage(job.lineage, consumed)
        return Done()

    def _record_to(self, job: RecordTo) -> Recording:
        self._peak_flops = job.peak_flops or metrics.peak_flops(self._ranks.device)
        if self._ranks.rank == 0:
            lessons = job.lessons
            config = [
                msgspec.structs.asdict(each)
                for each in (lessons.objective, lessons.optimiser, lessons.schedule)
            ]
            self._metrics = metrics.Metrics(
                job.tensorboard, job.wandb, job.run, config[0] | config[1] | config[2]
            )
        return Recording(ranks=self._ranks.world)

    def _record(self, job: Record) -> Done:
        self._metrics.record(
            job.step, {**job.figures, "environment_rewards": job.environment_rewards}
        )
        return Done()

    def _train(self, job: TrainStep) -> Trained:
        learner = self._held()
        started = time.perf_counter()
        read = [read_groups(submission, learner.policies) for submission in job.submissions]
        # If one rank cannot read a submission, no rank trains on it.
        failed = self._ranks.max([float(isinstance(found, str)) for found in read])
        if any(failed):
            return Trained(
                unreadable=[
                    Unreadable(
                        index=index,
                        reason=found if isinstance(found, str) else "another rank cannot read it",
                    )
                    for index, (found, bad) in enumerate(zip(read, failed, strict=True))
                    if bad
                ]
            )
        by_submission = [found for found in read if not isinstance(found, str)]
        groups = [group for some in by_submission for group in some]
        found = learner.train_step(
            groups, job.step, [submission.digest.hex() for submission in job.submissions]
        )
        used = {id(group) for group in informative(groups)}
        seconds = time.perf_counter() - started
        peak = self._peak_flops * self._ranks.world
        return Trained(
            figures={**found, **metrics.speed(learner.model, groups, seconds, peak)},
            outcomes=[
                ["consumed" if id(group) in used else "zero-advantage" for group in some]
                for some in by_submission
            ],
        )

    def _begin_save(self, job: BeginSave) -> Done:
        self._held().begin_save(Path(job.folder))
        return Done()

    def _finish_save(self, job: FinishSave) -> Done:
        self._held().finish_save()
        return Done()

    def _export(self, job: Export) -> Done:
        self._held().export(Path(job.folder))
        return Done()

    def _evaluate(self, job: Evaluate) -> Evaluated:
        if self._ranks.rank != 0:  # only rank 0 answers
            return Evaluated(sampled=0.0, greedy=0.0)
        found: dict[str, Accuracy] = {}
        shares: dict[str, float] = {}
        total = sum(reference.weight for reference in self._references)
        for label, reference in zip(labels(self._references), self._references, strict=True):
            if reference.weight:
                shares[label] = reference.weight / total
                environment = self._environments.of(reference)
                found[label] = accuracy(
                    Path(job.folder), environment, self._sampling, job.prompts, job.split
                )
        return Evaluated(
            sampled=sum(share * found[label].sampled for label, share in shares.items()),
            greedy=sum(share * found[label].greedy for label, share in shares.items()),
            environments=found,
        )

    def _prepare_base(self, job: PrepareBase) -> BasePrepared:
        if self._ranks.rank != 0:
            return BasePrepared(sft_steps=0, sampled=0.0, greedy=0.0)
        return prepare_base(Path(job.folder), job.seed)

    def _held(self) -> Learner:
        if self._learner is None:
            raise ValueError("call start or resume first")
        return self._learner


_SERVICE: type[TrainingService] = TrainerService


def _paths(folders: Mapping[int, str]) -> dict[int, Path]:
    return {step: Path(folder) for step, folder in folders.items()}
