"""The service of the trainer's child process: learns, saves and exports."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import trio

from peers.engines.device import use_hardware
from peers.learning import metrics
from peers.learning.batch import AcceptedGroups
from peers.learning.lead import lead
from peers.learning.learner import Learner
from peers.learning.plan import sharding_of
from peers.learning.ranks import LearnerThread, Ranks
from peers.learning.reading import check_file, read_groups
from peers.learning.settings import LearnerSettings
from peers.learning.values import give_values
from peers.trainer.planning import plan_training
from peers.trainer.privileged import PrivilegedPrompts
from swarm.jobs import training
from swarm.jobs.memory import MemoryPlan
from swarm.world.landlock import reading_in_home
from swarm.world.tasks import JobThread, in_job_thread


@reading_in_home("trainer", "checkpoints", "accepted")
def open_service(setup: training.TrainingSetup) -> Any:
    """Open the service of the trainer's child: it leads the other ranks under `torchrun`."""
    use_hardware(setup.hardware)
    return lead(TrainerService, setup.hardware.device)


class TrainerService:
    """Implements `TrainingService`: holds this rank's part of the learner."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or Ranks()
        self._learner: Learner | None = None
        self._ahead: dict[bytes, tuple[training.AcceptedSubmission, AcceptedGroups]] = {}
        """Submissions read ahead of their step, by digest; the same on every rank."""
        self._metrics = metrics.Metrics()
        self._peak_flops = 0.0
        self._pass_tokens = 0
        """Tokens in one forward pass, by the plan; 0: there was none."""
        self._thread: JobThread = LearnerThread(self._ranks)
        self._recording = trio.Lock()

    async def end(self) -> None:
        """A single process has no other ranks to end."""

    @in_job_thread
    def plan(self, job: training.PlanTraining) -> MemoryPlan:
        found = plan_training(job.start, self._ranks)
        self._pass_tokens = found.tokens
        return found

    @in_job_thread
    def start(self, job: training.StartTraining) -> None:
        self._begin(job)
        if job.policy:
            self._held().begin_with(Path(job.policy), job.step, job.lineage)

    def _begin(self, job: training.StartTraining) -> None:
        self._ahead.clear()
        settings = LearnerSettings(
            objective=job.terms.objective,
            optimiser=job.terms.optimiser,
            schedule=job.terms.schedule,
            seed=job.seed,
            completion_tokens_max=job.terms.sampling.max_new_tokens,
            adapter=job.terms.adapter,
            teacher=job.teacher,
            log_difference_max=job.terms.thresholds.log_difference_max,
            sharding=self._sharding_of(job),
            attention=None if job.attention == "fastest" else job.attention,
        )
        self._model = Path(job.model)
        self._prompts = PrivilegedPrompts(self._model, job.terms)
        self._learner = Learner(self._model, settings, ranks=self._ranks)

    def _sharding_of(self, job: training.StartTraining) -> training.Sharding:
        sharding = sharding_of(Path(job.model), job.dtype, job.sharding, self._ranks.device)
        tokens = sharding.pass_tokens or self._pass_tokens
        return msgspec.structs.replace(sharding, pass_tokens=tokens)

    @in_job_thread
    def resume(self, job: training.Resume) -> training.Resumed:
        self._begin(job.start)
        learner = self._held()
        learner.load(Path(job.folder), _paths(job.policies))
        consumed = [name for names in learner.consumed.values() for name in names]
        return training.Resumed(
            step=learner.step, consumed=[bytes.fromhex(name) for name in consumed]
        )

    @in_job_thread
    def follow(self, job: training.Follow) -> None:
        terms = job.terms
        self._ahead.clear()  # scored for the objective before
        self._prompts = PrivilegedPrompts(self._model, terms)
        learner = self._held()
        learner.follow(
            dataclasses.replace(
                learner.settings,
                objective=terms.objective,
                optimiser=terms.optimiser,
                schedule=terms.schedule,
                completion_tokens_max=terms.sampling.max_new_tokens,
            )
        )

    @in_job_thread
    def roll_back(self, job: training.RollBack) -> None:
        learner = self._held()
        consumed = learner.consumed
        learner.load(Path(job.folder), _paths(job.policies))
        learner.begin_lineage(job.lineage, consumed)
        self._ahead.clear()  # of policies with the same numbers, but of the lineage before

    @in_job_thread
    def record_to(self, job: training.RecordTo) -> int:
        self._peak_flops = job.peak_flops or metrics.peak_flops(self._ranks.device)
        if self._ranks.rank == 0:
            terms = job.terms
            config: dict[str, Any] = {}
            for each in (terms.objective, terms.optimiser, terms.schedule):
                config |= msgspec.structs.asdict(each)
            config["process"] = msgspec.structs.asdict(terms.objective.process)
            config["digest"] = terms.objective.digest.hex()
            self._metrics = metrics.Metrics(job.tensorboard, job.wandb, job.run, config)
        return self._ranks.world

    async def record(self, job: training.Record) -> None:
        """Not in the job thread, which may be training."""
        figures = {**job.figures, "environments": job.environments}
        async with self._recording:
            await trio.to_thread.run_sync(self._metrics.record, job.step, figures)

    @in_job_thread
    def score(self, job: training.ScoreAhead) -> None:
        read, unreadable = self._read(job.submissions)
        failed = {each.index for each in unreadable}
        given = (each for index, each in enumerate(job.submissions) if index not in failed)
        self._ahead |= {
            each.digest: (each, groups) for each, groups in zip(given, read, strict=True)
        }
        self._held().score(read)

    @in_job_thread
    def train(self, job: training.TrainStep) -> training.Trained:
        learner = self._held()
        started = time.perf_counter()
        read, unreadable = self._read(job.submissions)
        if unreadable:
            return training.Trained(unreadable=unreadable)
        for each, values in zip(read, job.values or [[] for _ in read], strict=True):
            give_values(each, values, learner.settings.objective)
        found = learner.train_step(read, job.step)
        self._ahead.clear()  # the rest waits for a later step, or was withdrawn
        seconds = time.perf_counter() - started
        peak = self._peak_flops * self._ranks.world
        learns = learner.settings.objective.learns
        used = [
            each.informative if learns else set(range(len(each.rewards))) - set(each.ungraded)
            for each in read
        ]
        return training.Trained(
            figures={**found, **metrics.speed(found, seconds, peak)},
            problems=learner.problems,
            outcomes=[
                [
                    "consumed" if group in used[index] else "zero-advantage"
                    for group in range(len(each.rewards))
                ]
                for index, each in enumerate(read)
            ],
            environments=learner.environments,
        )

    def _read(
        self, submissions: Sequence[training.AcceptedSubmission]
    ) -> tuple[list[AcceptedGroups], list[training.Unreadable]]:
        """This rank's share of the submissions that all ranks can read, and the other submissions.

        Each file is checked by one rank before any rank reads its share: offsets may be damaged."""
        reasons = self._agree([self._problem(*each) for each in enumerate(submissions)])
        found = [
            reason or self._share(each) for each, reason in zip(submissions, reasons, strict=True)
        ]
        reasons = self._agree([each if isinstance(each, str) else "" for each in found])
        read = [
            each
            for each, reason in zip(found, reasons, strict=True)
            if not reason and not isinstance(each, str)
        ]
        failed = [(index, reason) for index, reason in enumerate(reasons) if reason]
        return read, [training.Unreadable(index=index, reason=reason) for index, reason in failed]

    def _agree(self, reasons: Sequence[str]) -> list[str]:
        """Why submissions cannot be read by all ranks, one by one; empty texts: they can."""
        failed = self._ranks.max([float(bool(reason)) for reason in reasons])
        return [
            reason or ("another rank cannot read it" if bad else "")
            for reason, bad in zip(reasons, failed, strict=True)
        ]

    def _problem(self, index: int, submission: training.AcceptedSubmission) -> str:
        """Why a submission cannot be read, as far as this rank checks it; empty if it can."""
        policies = self._held().policies
        if submission.policy not in policies:
            return f"its policy {submission.policy} is not held here; held policies: {policies}"
        if index % self._ranks.world != self._ranks.rank or self._read_ahead(submission):
            return ""
        try:
            check_file(submission)
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def _share(self, submission: training.AcceptedSubmission) -> AcceptedGroups | str:
        """This rank's share of a submission whose file is right, or why it cannot be read."""
        groups = self._read_ahead(submission)
        try:
            groups = groups or read_groups(submission, self._ranks)
        except (OSError, ValueError) as error:
            return str(error)
        self._prompts.give(groups, submission.seed)
        policies = self._held().policies
        for policy in groups.policies:
            if policy not in policies:
                return f"a span's policy {policy} is not held here; held policies: {policies}"
        return groups

    def _read_ahead(self, submission: training.AcceptedSubmission) -> AcceptedGroups | None:
        before, groups = self._ahead.get(submission.digest, (None, None))
        return groups if before == submission else None

    @in_job_thread
    def begin_save(self, job: training.BeginSave) -> None:
        state, policy = (Path(folder) if folder else None for folder in (job.state, job.policy))
        self._held().begin_save(state, policy)

    async def finish_save(self, job: training.FinishSave) -> None:
        """Not in the job thread, which may be training."""
        await trio.to_thread.run_sync(self._held().finish_save)

    @in_job_thread
    def export(self, job: training.Export) -> None:
        self._held().export(Path(job.folder), base=job.base)

    @in_job_thread
    def compare(self, job: training.Compare) -> bool:
        return self._held().matches(Path(job.folder))

    def _held(self) -> Learner:
        if self._learner is None:
            raise ValueError("call start or resume first")
        return self._learner


_SERVICE: type[training.TrainingService] = TrainerService


def _paths(folders: Mapping[int, str]) -> dict[int, Path]:
    return {step: Path(folder) for step, folder in folders.items()}
