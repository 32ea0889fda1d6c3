"""The service of a replica that contributes an RL trainer's policy (`swarm.jobs.merging_exchange`).

It takes no inner steps and holds no weights: everything is computed from files, a piece at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.engines import model as policy_model
from peers.engines.device import use_hardware
from peers.learning import merging_folder as exchange
from peers.learning.durable import whole_folder
from peers.learning.merging_folder import (
    ANSWER,
    FACTS,
    SNAPSHOT,
    AnswerFacts,
    SnapshotFacts,
)
from peers.learning.stored import StoredWeights
from peers.outer.learning import contribution, state
from peers.outer.learning.compression import VALUE_MAX, BadContribution
from peers.outer.learning.contribution import Contribution, Header, file_bytes_max, pieces
from peers.outer.learning.file_jobs import FileJobs, Merging
from peers.outer.learning.state import StateFile
from peers.outer.learning.tensor_file import TensorFileWriter
from swarm.errors import UserError
from swarm.jobs.merging_exchange import (
    AnswerSnapshot,
    ContributeSnapshot,
    ExchangeService,
    ExchangeStarted,
    KeepAnchor,
    LookForSnapshot,
    RefuseSnapshot,
    SnapshotSeen,
    StartExchange,
)
from swarm.jobs.outer import OuterSetup
from swarm.world.landlock import reading_in_home
from swarm.world.progress import report

CHANGE = "change.safetensors"
_CHANGE_FORMAT = "swarm-outer-change-1"

Weight = Callable[[str, slice], Tensor]
"""A piece of a weight by name, flat fp32."""


@reading_in_home("outer", "trainer", "checkpoints")
def open_service(setup: OuterSetup) -> Any:
    """Open the service; it needs no accelerator."""
    use_hardware(setup.hardware)
    return ExchangingService()


class ExchangingService(FileJobs):
    """Implements the part of `ExchangeService` that is not in `FileJobs`."""

    async def start_exchange(self, job: StartExchange) -> ExchangeStarted:
        def start() -> ExchangeStarted:
            folder = Path(job.model)
            dtype = StoredWeights(folder).dtype()
            model = policy_model.blank(folder, dtype)
            shapes = {name: tuple(value.shape) for name, value in sorted(model.named_parameters())}
            self._model = Merging(folder, model.config, shapes, dtype)
            self._header = Header(job.compression, list(shapes.items()))
            self._exchange = Path(job.exchange)
            self._base = exchange.base_of(folder)
            self._exchange.mkdir(parents=True, exist_ok=True)
            aside = self._exchange / f"{exchange.GREETING}.aside"
            exchange.write_facts(exchange.Greeting(job.inner_steps, job.number), aside)
            aside.rename(self._exchange / exchange.GREETING)
            return ExchangeStarted(
                parameters=policy_model.count_parameters(model),
                contribution_bytes_max=file_bytes_max(shapes, job.compression),
            )

        return await self._on_files(start)

    async def look_for_snapshot(self, job: LookForSnapshot) -> SnapshotSeen:
        return await self._on_files(self._look)

    def _look(self) -> SnapshotSeen:
        found = exchange.numbers(self._exchange, SNAPSHOT)
        if not found:
            return SnapshotSeen()
        number = found[-1]
        answered = exchange.folder_of(self._exchange, ANSWER, number).exists()
        try:
            facts = exchange.read_facts(self._snapshot(number) / FACTS, SnapshotFacts)
        except UserError as error:
            return SnapshotSeen(number=number, answered=answered, problem=str(error))
        return SnapshotSeen(
            number=number,
            adopted=facts.adopted,
            steps=facts.steps,
            answered=answered,
            problem=self._problem_of(facts),
        )

    def _problem_of(self, facts: SnapshotFacts) -> str:
        """Why an RL trainer's policies cannot be merged here; empty if they can."""
        base = self._model.folder
        if facts.base.tokenizer != self._base.tokenizer:
            return f"its tokenizer is another than that of {base}, the model that is merged here"
        if facts.base.weights != self._base.weights:
            return f"it began with another policy than {base}, the model that is merged here"
        return ""

    def _snapshot(self, number: int) -> Path:
        return exchange.folder_of(self._exchange, SNAPSHOT, number)

    def _weights_of(self, number: int) -> Weight:
        """A snapshot's weights; raises `UserError` if they do not fit or are not finite."""
        folder = self._snapshot(number)
        stored = StoredWeights(folder)
        for name, shape in self._model.shapes.items():
            if stored.shapes.get(name) != shape:
                raise UserError(
                    f"{folder}: {name} has shape {stored.shapes.get(name)}, not {shape}"
                )
        last = ("", torch.empty(0))

        def weight(name: str, piece: slice) -> Tensor:
            nonlocal last
            if last[0] != name:
                whole = tuple(slice(None) for _ in self._model.shapes[name])
                last = name, stored.part(name, whole).float().reshape(-1)
            return last[1][piece]

        return weight

    async def contribute_snapshot(self, job: ContributeSnapshot) -> str:
        def contribute() -> str:
            try:
                self._contribute(job)
            except (UserError, OSError) as error:
                return str(error)
            return ""

        return await self._on_files(contribute)

    def _contribute(self, job: ContributeSnapshot) -> None:
        snapshot = self._weights_of(job.number)
        anchor = StateFile(Path(job.anchor) / state.FILE)

        def piece_of(name: str, piece: slice) -> tuple[Tensor, Tensor]:
            before = anchor.weight(name, piece)
            values = before - snapshot(name, piece)
            largest = float(values.abs().max())
            if not largest <= VALUE_MAX:  # nor NaN
                raise UserError(
                    f"the RL trainer has moved a weight of {name} by {largest:g}; the most is "
                    f"{VALUE_MAX:g}"
                )
            return values, before

        with whole_folder(Path(job.contribution)) as aside:
            contribution.write(
                aside / contribution.FILE, self._header, piece_of, lambda *rest: None
            )

    async def answer_snapshot(self, job: AnswerSnapshot) -> str:
        def answer() -> str:
            try:
                self._answer(job)
            except (UserError, BadContribution, OSError) as error:
                return str(error)
            return ""

        return await self._on_files(answer)

    async def keep_anchor(self, job: KeepAnchor) -> None:
        def keep() -> None:
            _keep(job.state, job.keep)

        return await self._on_files(keep)

    def _answer(self, job: AnswerSnapshot) -> None:
        _keep(job.state, job.keep)
        adopted = Path(job.keep) / state.FILE
        with whole_folder(exchange.folder_of(self._exchange, ANSWER, job.number)) as aside:
            norm = self._write_change(job, StateFile(adopted), aside) if job.trainers else 0.0
            facts = AnswerFacts(
                number=job.number,
                round=job.round,
                trainers=job.trainers,
                norm=norm,
                changes=bool(job.trainers),
            )
            exchange.write_facts(facts, aside / FACTS)

    def _write_change(self, job: AnswerSnapshot, adopted: StateFile, folder: Path) -> float:
        """Write state − anchor + own contribution; return its norm."""
        shapes, total = self._model.shapes, 0.0
        before = (
            StateFile(Path(job.anchor) / state.FILE).weight
            if job.anchor
            else self._weights_of(job.number)
        )
        own = Path(job.contribution) / contribution.FILE if job.contribution else None
        writer = TensorFileWriter(folder / CHANGE, _CHANGE_FORMAT, shapes)
        with nullcontext() if own is None else Contribution(own, shapes) as sent:
            for name, shape in shapes.items():
                for piece in pieces(shape):
                    report()
                    change = adopted.weight(name, piece) - before(name, piece)
                    if sent is not None:
                        change += sent.piece(name, piece)
                    total += float(change.double().square().sum())
                    writer.write(name, piece, change)
        writer.finish()
        return math.sqrt(total)

    async def refuse_snapshot(self, job: RefuseSnapshot) -> None:
        def refuse() -> None:
            with whole_folder(exchange.folder_of(self._exchange, ANSWER, job.number)) as aside:
                exchange.write_facts(
                    AnswerFacts(number=job.number, problem=job.problem), aside / FACTS
                )

        return await self._on_files(refuse)


def _keep(state_folder: str, folder: str) -> None:
    """Keep an outer state, which takes no room while its own folder exists."""
    with whole_folder(Path(folder)) as aside:
        os.link(Path(state_folder) / state.FILE, aside / state.FILE)


_SERVICE: type[ExchangeService] = ExchangingService
