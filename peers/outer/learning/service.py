"""The service of the child of one of several trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers.engines import loading
from peers.engines import model as policy_model
from peers.engines.device import use_hardware
from peers.learning.durable import delete_unfinished, whole_folder
from peers.learning.lead import lead
from peers.learning.ranks import LearnerThread, Ranks
from peers.outer.learning import state
from peers.outer.learning.contribution import file_bytes_max
from peers.outer.learning.file_jobs import FileJobs, Merging
from peers.outer.learning.replica import Replica
from peers.outer.learning.state import StateFile
from swarm.jobs.outer import (
    AloneService,
    DrawModel,
    MeasureState,
    OuterService,
    OuterSetup,
    ReplicaStarted,
    RoundTrained,
    StartReplica,
    TrainRound,
)
from swarm.world.landlock import reading_in_home
from swarm.world.tasks import JobThread, in_job_thread


@reading_in_home("outer", "trainer", "checkpoints")
def open_service(setup: OuterSetup) -> Any:
    """Open the service: a `ReplicaService`, which leads the other ranks under `torchrun`."""
    use_hardware(setup.hardware)
    return lead(ReplicaService, setup.hardware.device)


class ReplicaService(FileJobs):
    """Implements `OuterService` and `AloneService`.

    Jobs on files alone do not wait for the learner.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        super().__init__()
        self._ranks = ranks or Ranks()
        self._thread: JobThread = LearnerThread(self._ranks)

    async def end(self) -> None:
        """A single process has no other ranks to end."""

    @in_job_thread
    def start(self, job: StartReplica) -> ReplicaStarted:
        if job.folder and self._ranks.rank == 0:
            delete_unfinished(Path(job.folder))
        self._job = job
        self._replica = Replica(job, self._ranks)
        policy, shapes = self._replica.policy, self._replica.shapes
        self._model = Merging(Path(job.model), policy.model, shapes, policy.published_dtype)
        return ReplicaStarted(
            parameters=policy_model.count_parameters(policy.model),
            contribution_bytes_max=file_bytes_max(shapes, job.compression),
            shapes=dict(shapes),
            sequences=self._replica.sequences,
            data=self._replica.data,
        )

    @in_job_thread
    def train(self, job: TrainRound) -> RoundTrained:
        before = Path(job.inner_before) if job.inner_before else None
        begun_from = StateFile(Path(job.state) / state.FILE)
        replica = self._replica
        replica.begin(begun_from, before)
        steps = list(replica.steps(job.round))
        replica.write(begun_from, before, Path(job.inner_after), Path(job.contribution))
        sums = {name: sum(step[name] for step in steps) for name in steps[0]}
        return RoundTrained(
            tokens=len(steps) * replica.predicted(self._job.inner.batch_sequences),
            figures={
                "loss": sums["loss"] / len(steps),
                "gradient_norm": sums["gradient_norm"] / len(steps),
                "learning_rate": steps[-1]["learning_rate"],
                "skipped": int(sums["skipped"]),
            },
        )

    @in_job_thread
    def measure(self, job: MeasureState) -> float | None:
        return self._replica.measure(StateFile(Path(job.state) / state.FILE))

    async def draw_model(self, job: DrawModel) -> None:
        def draw() -> None:
            with whole_folder(Path(job.folder)) as aside:
                policy_model.save(loading.random(Path(job.model), job.seed), aside, Path(job.model))

        return await self._on_files(draw)


_SERVICE: type[OuterService] = ReplicaService
_ALONE: type[AloneService] = ReplicaService
