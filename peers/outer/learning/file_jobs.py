"""The jobs of a trainer's child that compute from files alone: states, contributions, merges."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from peers.engines import model as policy_model
from peers.engines.loading import published
from peers.learning.durable import whole_folder
from peers.learning.stored import StoredWeights
from peers.outer.learning import contribution, state
from peers.outer.learning.compression import BadContribution
from peers.outer.learning.contribution import Contribution
from peers.outer.learning.state import Given, OuterOptimiser, StateFile
from peers.outer.learning.tensor_file import Shapes
from swarm.errors import UserError
from swarm.jobs.outer import (
    CheckState,
    ExportState,
    FirstState,
    InspectContribution,
    LeftOut,
    Merged,
    MergeRound,
    OuterState,
)
from swarm.world.tasks import JobThread

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

    async def first_state(self, job: FirstState) -> OuterState:
        def write() -> OuterState:
            stored = StoredWeights(self._model.folder)

            def weight_of(name: str) -> Any:
                return stored.part(name, tuple(slice(None) for _ in stored.shapes[name]))

            with whole_folder(Path(job.folder)) as aside:
                digest = state.begin(self._model.shapes, weight_of, aside / state.FILE)
            return OuterState(digest=digest)

        return await self._on_files(write)

    async def check_state(self, job: CheckState) -> OuterState:
        def check() -> OuterState:
            try:
                found = StateFile(Path(job.folder) / state.FILE)
                problem = found.problem(self._model.shapes)
                return OuterState(digest=found.digest(), problem=problem)
            except (UserError, OSError) as error:
                return OuterState(digest=bytes(32), problem=str(error))

        return await self._on_files(check)

    async def inspect(self, job: InspectContribution) -> str:
        return await self._on_files(lambda: self._inspect(job.contribution)[1])

    async def merge(self, job: MergeRound) -> Merged:
        def merge() -> Merged:
            given, norms, left_out = [], [], []
            for each in job.contributions:
                norm, problem = self._inspect(each.folder)
                if problem:
                    left_out.append(LeftOut(trainer=each.trainer, problem=problem))
                else:
                    path = Path(each.folder) / contribution.FILE
                    given.append(Given(each.trainer, each.tokens, path, norm))
                    norms.append(norm)
            before = StateFile(Path(job.state) / state.FILE)
            how = OuterOptimiser(job.learning_rate, job.momentum)
            with whole_folder(Path(job.folder)) as aside:
                if given:
                    digest = state.merge(before, given, how, aside / state.FILE)
                else:
                    os.link(before.path, aside / state.FILE)
                    digest = before.digest()
            longest = state.longest_of(norms)
            return Merged(
                digest=digest,
                left_out=left_out,
                shortened=[
                    each.trainer for each, norm in zip(given, norms, strict=True) if norm > longest
                ],
            )

        return await self._on_files(merge)

    async def export_state(self, job: ExportState) -> None:
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

    def _inspect(self, folder: str) -> tuple[float, str]:
        """Return a contribution's norm, or in one sentence what is wrong with it."""
        try:
            with Contribution(Path(folder) / contribution.FILE, self._model.shapes) as file:
                return file.check(), ""
        except BadContribution as error:
            return 0.0, str(error)
        except OSError as error:
            return 0.0, f"the file cannot be read ({error.strerror})"
