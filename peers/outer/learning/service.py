"""The service of the child of one of several trainers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from peers.engines import model as policy_model
from peers.engines.device import use_hardware
from peers.outer.learning import contribution, state
from peers.outer.learning.compression import BadContribution
from peers.outer.learning.contribution import Contribution, file_bytes_max
from peers.outer.learning.replica import Replica
from peers.outer.learning.state import Given, OuterOptimiser, StateFile
from peers.trainer.learning.durable import whole_folder
from peers.trainer.learning.lead import lead
from peers.trainer.learning.ranks import Ranks
from peers.trainer.learning.stored import StoredWeights
from peers.trainer.learning.thread import LearnerThread
from swarm.errors import UserError
from swarm.jobs.outer import (
    AloneService,
    CheckState,
    DrawModel,
    ExportState,
    FirstState,
    InspectContribution,
    Inspected,
    LeftOut,
    MeasureState,
    Merged,
    MergeRound,
    OuterService,
    OuterSetup,
    OuterState,
    ReplicaStarted,
    RoundTrained,
    StartReplica,
    StateMeasured,
    TrainRound,
)
from swarm.jobs.training import Done, EndTraining
from swarm.world.job_thread import JobThread, in_job_thread

T = TypeVar("T")


def open_service(setup: OuterSetup) -> Any:
    """Open the service: a `ReplicaService`, which leads the other ranks under `torchrun`."""
    use_hardware(setup.hardware)
    return lead(ReplicaService, setup.hardware.device)


class ReplicaService:
    """Implements `OuterService` and `AloneService`.

    Jobs on files alone do not wait for the learner.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or Ranks()
        self._thread: JobThread = LearnerThread(self._ranks)
        self._files = JobThread()

    async def end(self, job: EndTraining) -> Done:
        """A single process has no other ranks to end."""
        return Done()

    @in_job_thread
    def start(self, job: StartReplica) -> ReplicaStarted:
        _check(job)
        self._job = job
        self._replica = Replica(job, self._ranks)
        return ReplicaStarted(
            parameters=policy_model.count_parameters(self._replica.policy.model),
            contribution_bytes_max=file_bytes_max(self._replica.shapes, job.compression),
            sequences=self._replica.sequences,
        )

    @in_job_thread
    def train(self, job: TrainRound) -> RoundTrained:
        before = Path(job.inner_before) if job.inner_before else None
        begun_from = StateFile(Path(job.state) / state.FILE)
        replica = self._replica
        replica.begin(begun_from, before)
        steps = list(replica.steps(job.round))
        replica.write(begun_from, before, Path(job.inner_after), Path(job.contribution))
        return RoundTrained(
            tokens=sum(step.tokens for step in steps),
            figures={
                "loss": sum(step.loss for step in steps) / len(steps),
                "gradient_norm": sum(step.gradient_norm for step in steps) / len(steps),
                "learning_rate": steps[-1].learning_rate,
                "skipped": sum(step.skipped for step in steps),
            },
        )

    @in_job_thread
    def measure(self, job: MeasureState) -> StateMeasured:
        return StateMeasured(loss=self._replica.measure(StateFile(Path(job.state) / state.FILE)))

    # --- files -------------------------------------------------------------------------------

    async def first_state(self, job: FirstState) -> OuterState:
        def write() -> OuterState:
            stored = StoredWeights(Path(self._job.model))

            def weight_of(name: str) -> Any:
                return stored.part(name, tuple(slice(None) for _ in stored.shapes[name]))

            with whole_folder(Path(job.folder)) as aside:
                digest = state.begin(self._replica.shapes, weight_of, aside / state.FILE)
            return OuterState(digest=digest)

        return await self._on_files(write)

    async def check_state(self, job: CheckState) -> OuterState:
        def check() -> OuterState:
            try:
                found = StateFile(Path(job.folder) / state.FILE)
                problem = found.problem(self._replica.shapes)
                return OuterState(digest=found.digest(), problem=problem)
            except (UserError, OSError) as error:
                return OuterState(digest=bytes(32), problem=str(error))

        return await self._on_files(check)

    async def inspect(self, job: InspectContribution) -> Inspected:
        return await self._on_files(lambda: Inspected(problem=self._problem(job.contribution)))

    async def merge(self, job: MergeRound) -> Merged:
        def merge() -> Merged:
            given, left_out = [], []
            for each in job.contributions:
                problem = self._problem(each.folder)
                if problem:
                    left_out.append(LeftOut(trainer=each.trainer, problem=problem))
                else:
                    path = Path(each.folder) / contribution.FILE
                    given.append(Given(each.trainer, each.tokens, path))
            before = StateFile(Path(job.state) / state.FILE)
            how = OuterOptimiser(job.learning_rate, job.momentum)
            with whole_folder(Path(job.folder)) as aside:
                if given:
                    digest = state.merge(before, given, how, aside / state.FILE)
                else:
                    os.link(before.path, aside / state.FILE)
                    digest = before.digest()
            return Merged(digest=digest, left_out=left_out)

        return await self._on_files(merge)

    async def export_state(self, job: ExportState) -> Done:
        def export() -> Done:
            policy, shapes = self._replica.policy, self._replica.shapes
            outer = StateFile(Path(job.state) / state.FILE)
            weights = {
                name: outer.weight(name).view(shape).to(policy.published_dtype)
                for name, shape in shapes.items()
            }
            with whole_folder(Path(job.folder)) as aside:
                policy_model.save_share(
                    weights,
                    aside,
                    policy.model.config,
                    Path(self._job.model),
                    0,
                    dict.fromkeys(weights, 0),
                )
            return Done()

        return await self._on_files(export)

    async def draw_model(self, job: DrawModel) -> Done:
        def draw() -> Done:
            with whole_folder(Path(job.folder)) as aside:
                policy_model.save(
                    policy_model.random(Path(job.model), job.seed), aside, Path(job.model)
                )
            return Done()

        return await self._on_files(draw)

    async def _on_files(self, work: Callable[[], T]) -> T:
        """Work in the thread for files, while the learner may be training."""
        return await self._files.run(lambda _: work(), None)

    def _problem(self, folder: str) -> str:
        try:
            with Contribution(Path(folder) / contribution.FILE, self._replica.shapes) as file:
                file.check()
        except BadContribution as error:
            return str(error)
        except OSError as error:
            return f"the file cannot be read ({error.strerror})"
        return ""


_SERVICE: type[OuterService] = ReplicaService
_ALONE: type[AloneService] = ReplicaService


def _check(job: StartReplica) -> None:
    """Raise `UserError` for a setting out of bounds."""
    for name, value in (("inner_steps", job.inner_steps), ("rounds", job.rounds)):
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")
