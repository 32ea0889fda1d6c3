"""The service of the child of one of several trainers."""

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from blake3 import blake3
from msgspec import structs

from peers.engines import loading
from peers.engines import model as policy_model
from peers.engines.device import use_hardware
from peers.engines.loading import published
from peers.learning.durable import delete_unfinished, whole_folder
from peers.learning.lead import lead
from peers.learning.metrics import Metrics
from peers.learning.packing import PASS_TOKENS_MAX
from peers.learning.plan import Model, fit, machine_of, of_rounds, sharding_of
from peers.learning.ranks import LearnerThread, Ranks
from peers.learning.stored import StoredWeights
from peers.outer.learning import contribution, scoring, state
from peers.outer.learning.contribution import BadContribution, Contribution, Header, file_bytes_max
from peers.outer.learning.replica import Replica
from peers.outer.learning.state import Given, OuterOptimiser, StateFile
from peers.outer.learning.tensor_file import Shapes
from swarm.errors import UserError
from swarm.jobs import outer as jobs
from swarm.jobs.memory import MemoryPlan
from swarm.jobs.training import Figures, Sharding
from swarm.world.landlock import reading_in_home
from swarm.world.tasks import JobThread, in_job_thread

T = TypeVar("T")


@dataclass(frozen=True)
class Merging:
    """The model whose weights are merged."""

    folder: Path
    """Its Hugging Face folder."""
    model: Any
    """transformers' own; it needs no weights."""
    shapes: Shapes
    dtype: torch.dtype
    """In which models are exported."""


class FileJobs:
    """Jobs that do not wait for a learner; they run in a thread of their own."""

    _model: Merging

    def __init__(self) -> None:
        self._files = JobThread()

    async def first_state(self, job: jobs.FirstState) -> jobs.OuterState:
        def write() -> jobs.OuterState:
            stored = StoredWeights(self._model.folder)

            def weight_of(name: str) -> Any:
                return stored.part(name, tuple(slice(None) for _ in stored.shapes[name]))

            with whole_folder(Path(job.folder)) as aside:
                digest = state.begin(self._model.shapes, weight_of, aside / state.FILE)
            return jobs.OuterState(digest=digest)

        return await self._on_files(write)

    async def check_state(self, job: jobs.CheckState) -> jobs.OuterState:
        def check() -> jobs.OuterState:
            try:
                found = StateFile(Path(job.folder) / state.FILE)
                problem = found.problem(self._model.shapes)
                return jobs.OuterState(digest=found.digest(), problem=problem)
            except (UserError, OSError) as error:
                return jobs.OuterState(digest=bytes(32), problem=str(error))

        return await self._on_files(check)

    async def inspect(self, job: jobs.InspectContribution) -> jobs.OuterState:
        def inspect() -> jobs.OuterState:
            _, problem, digest = self._inspect(job.contribution, job.shard, job.shards)
            return jobs.OuterState(digest=digest, problem=problem)

        return await self._on_files(inspect)

    async def merge(self, job: jobs.MergeRound) -> jobs.Merged:
        def merge() -> jobs.Merged:
            before = StateFile(Path(job.state) / state.FILE)
            how = OuterOptimiser(job.learning_rate, job.momentum)
            with whole_folder(Path(job.folder)) as aside:
                if job.shards:
                    shards = [Path(each) / contribution.FILE for each in job.shards]
                    return jobs.Merged(digest=state.apply(before, shards, how, aside / state.FILE))
                given, found = self._given(job.contributions)
                if given:
                    path = aside / state.FILE
                    digest = state.merge(before, given, how, path, job.strangers_share)
                else:
                    os.link(before.path, aside / state.FILE)
                    digest = before.digest()
            return structs.replace(found, digest=digest)

        return await self._on_files(merge)

    async def merge_shard(self, job: jobs.MergeShard) -> jobs.Merged:
        def merge() -> jobs.Merged:
            given, found = self._given(job.contributions, job.shard, job.shards)
            shapes = self._model.shapes
            header = Header(job.compression, list(shapes.items()), job.shard, job.shards)
            with whole_folder(Path(job.folder)) as aside:
                state.merge_shard(given, shapes, header, aside / contribution.FILE)
            digest = self._inspect(job.folder, job.shard, job.shards)[2]
            return structs.replace(found, digest=digest)

        return await self._on_files(merge)

    def _given(
        self, contributions: Sequence[jobs.Contributed], shard: int = 0, shards: int = 1
    ) -> tuple[list[Given], jobs.Merged]:
        """The contributions that can be merged, and what is to be said of the others."""
        given, left_out = [], []
        for each in contributions:
            norm, problem, _ = self._inspect(each.folder, shard, shards)
            if problem:
                left_out.append(jobs.LeftOut(trainer=each.trainer, problem=problem))
            else:
                path = Path(each.folder) / contribution.FILE
                given.append(Given(each.trainer, each.tokens, path, norm, each.weight))
        named = [(each.trainer, each.norm or 0.0) for each in given if each.weight is None]
        longest = state.longest_of([norm for _, norm in named])
        longer = [trainer for trainer, norm in named if norm > longest]
        return given, jobs.Merged(digest=bytes(32), left_out=left_out, shortened=longer)

    async def export_state(self, job: jobs.ExportState) -> None:
        def export() -> None:
            model = self._model
            outer = StateFile(Path(job.state) / state.FILE)
            weights = {
                name: outer.weight(name).view(shape).to(model.dtype)
                for name, shape in model.shapes.items()
            }
            with whole_folder(Path(job.folder)) as aside:
                stored = published(model.model, weights)
                policy_model.save_share(
                    stored, aside, model.model.config, model.folder, 0, dict.fromkeys(stored, 0)
                )

        return await self._on_files(export)

    async def _on_files(self, work: Callable[[], T]) -> T:
        """Work in the thread for files, while the learner may be training."""
        return await self._files.run(lambda _: work(), None)

    def _inspect(self, folder: str, shard: int = 0, shards: int = 1) -> tuple[float, str, bytes]:
        """Return the norm of a contribution's file, or in one sentence what is wrong with it, and
        BLAKE3-256 of what it decompresses to."""
        payloads, path = blake3(), Path(folder) / contribution.FILE
        try:
            with Contribution(path, self._model.shapes, shard, shards) as file:
                return file.check(payloads), "", payloads.digest()
        except BadContribution as error:
            return 0.0, str(error), bytes(32)
        except OSError as error:
            return 0.0, f"the file cannot be read ({error.strerror})", bytes(32)


@reading_in_home("outer", "trainer", "checkpoints")
def open_service(setup: jobs.OuterSetup) -> Any:
    """Open the service: a `ReplicaService`, which leads the other ranks under `torchrun`."""
    use_hardware(setup.hardware)
    return lead(ReplicaService, setup.hardware.device)


class ReplicaService(FileJobs):
    """Implements `OuterService` and `AloneService`.

    Jobs on files alone do not wait for the learner."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        super().__init__()
        self._ranks = ranks or Ranks()
        self._thread: JobThread = LearnerThread(self._ranks)
        self._metrics = Metrics()

    async def end(self) -> None:
        """A single process has no other ranks to end."""

    @in_job_thread
    def start(self, job: jobs.StartReplica) -> jobs.ReplicaStarted:
        if job.folder and self._ranks.rank == 0:
            delete_unfinished(Path(job.folder))
        try:
            device = self._ranks.device
            how = sharding_of(Path(job.model), job.dtype, job.sharding, device)
            plan = plan_replica(job, how, self._ranks) if job.memory_check else None
            if plan is not None and plan.problem and job.memory_check == "refuse":
                raise UserError(plan.problem)
            tokens = how.pass_tokens or (plan.tokens if plan is not None else 0)
            how = structs.replace(how, pass_tokens=tokens)
            self._job = job = structs.replace(job, sharding=how)
            if self._ranks.rank == 0:
                self._metrics = Metrics(job.tensorboard, job.wandb, job.run)
            self._replica = Replica(job, self._ranks)
        except UserError as error:  # its settings have the names of a run's trainer
            raise UserError(re.sub(r"\btrainer\.(?=\w)", "replica.", str(error))) from error
        policy, shapes = self._replica.policy, self._replica.shapes
        self._model = Merging(Path(job.model), policy.model, shapes, policy.published_dtype)
        return jobs.ReplicaStarted(
            parameters=policy_model.count_parameters(policy.model),
            contribution_bytes_max=file_bytes_max(shapes, job.compression, job.shards),
            shapes=dict(shapes),
            sequences=self._replica.sequences,
            data=self._replica.data,
            plan=plan,
        )

    @in_job_thread
    def train(self, job: jobs.TrainRound) -> jobs.RoundTrained:
        before = Path(job.inner_before) if job.inner_before else None
        begun_from = StateFile(Path(job.state) / state.FILE)
        replica = self._replica
        replica.begin(begun_from, before)
        begins = (job.round - 1) * self._job.inner_steps
        self._record(begins, job.known)
        steps = []
        for number, figures in enumerate(replica.steps(job.round, job.seed), begins + 1):
            self._record(number, figures)
            steps.append(figures)
        replica.write(begun_from, before, Path(job.inner_after), Path(job.contribution))
        sums = {name: sum(step[name] for step in steps) for name in steps[0]}
        return jobs.RoundTrained(
            tokens=len(steps) * replica.predicted(self._job.inner.batch_sequences),
            figures={
                "loss": sums["loss"] / len(steps),
                "gradient_norm": sums["gradient_norm"] / len(steps),
                "learning_rate": steps[-1]["learning_rate"],
                "skipped": int(sums["skipped"]),
            },
        )

    def _record(self, step: int, figures: Figures) -> None:
        """Write a point of the curves, after so many inner steps."""
        told = dict(figures)
        for name in {"loss", "validation_loss"} & told.keys():
            told[name.replace("loss", "perplexity")] = math.exp(min(told[name], 700.0))
        self._metrics.record(step, told)

    @in_job_thread
    def measure(self, job: jobs.MeasureState) -> float | None:
        return self._replica.measure(StateFile(Path(job.state) / state.FILE))

    @in_job_thread
    def score(self, job: jobs.ScoreRound) -> list[jobs.Scored]:
        return scoring.score(self._replica, job)

    async def draw_model(self, job: jobs.DrawModel) -> None:
        def draw() -> None:
            with whole_folder(Path(job.folder)) as aside:
                policy_model.save(loading.random(Path(job.model), job.seed), aside, Path(job.model))

        return await self._on_files(draw)


def plan_replica(job: jobs.StartReplica, how: Sharding, ranks: Ranks) -> MemoryPlan:
    """Plan this rank's memory, with passes that fit; raises `UserError` for a broken config."""
    inner = job.inner
    parts = max(1, ranks.world // (how.tensor_parallel * how.sequence_parallel))
    mine = -(-inner.batch_sequences // parts) * inner.sequence_tokens
    return fit(
        Model(Path(job.model)),
        how,
        machine_of(ranks),
        of_rounds(min(how.pass_tokens or PASS_TOKENS_MAX, mine), inner.sequence_tokens),
    )


_SERVICE: type[jobs.OuterService] = ReplicaService
_ALONE: type[jobs.AloneService] = ReplicaService
