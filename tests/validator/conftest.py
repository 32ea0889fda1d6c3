"""One honest submission of a small policy, and the services that judge it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from blake3 import blake3

from peers.demo.recipes import THRESHOLDS
from peers.engines import demo
from peers.engines.service import EngineService
from peers.validator.cases import Outcome
from peers.validator.inspector import InspectorService
from peers.validator.prefill import PrefillService
from swarm.jobs import Load, SubmissionOrder
from swarm.jobs.inference import Generate, InferenceSetup
from swarm.jobs.validation import Inspect, InspectionSetup, Judge, Judged, PrefillSetup
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import Header, ReadLimits, read, write
from tests.background import Ask, in_background, inspect_whole
from tests.orders import ORDER, submission_order

torch.set_num_threads(1)  # two OpenMP threads on shared cores are many times slower

STOP_IDS = [2, *range(40, 52)]
"""Many, so that a policy with random weights stops often."""


def load(engine: EngineService, folder: Path) -> None:
    trio.run(engine.load, Load(policy=ORDER.policy, folder=str(folder)))


def generate(engine: EngineService, path: Path, order: SubmissionOrder) -> None:
    trio.run(engine.generate, Generate(order=order, path=str(path)))


@dataclasses.dataclass
class Stage:
    """A policy, a worker, a validator, and the order that both sides know."""

    policy: Path
    folder: Path
    engine: EngineService
    inspector: InspectorService
    prefill: PrefillService
    ask: Ask
    """Awaits a method of the inspector."""

    def order(self, **changes: Any) -> SubmissionOrder:
        return submission_order(**{"stop_ids": STOP_IDS, **changes})

    def seed(self, **changes: Any) -> bytes:
        return self.order(**changes).seed()

    def generate(self, **changes: Any) -> tuple[Header, Rollouts]:
        """An honest submission's content."""
        path = self.folder / "generated"
        generate(self.engine, path, self.order(**changes))
        found = read(path, ReadLimits(1 << 20, 1 << 10, 1 << 10, 1 << 10, 1 << 10))
        return found.header, found.rollouts

    def inspect_bytes(self, raw: bytes, **changes: Any) -> Outcome:
        path = self.folder / "pushed"
        path.write_bytes(raw)
        return self.inspect_file(path, blake3(raw).digest(), **changes)

    def inspect_file(self, path: Path, digest: bytes, hung: str = "", **changes: Any) -> Outcome:
        job = Inspect(
            order=self.order(**changes),
            path=str(path),
            digest=digest,
            canonical_path=str(self.folder / "canonical"),
            tokenizer_folder=str(self.policy),
            bytes_max=1 << 20,
        )
        return inspect_whole(self.ask, self.inspector, job, hung)

    def inspect(self, header: Header, rollouts: Rollouts, **changes: Any) -> Outcome:
        write(self.folder / "aside", rollouts, header)
        return self.inspect_bytes((self.folder / "aside").read_bytes(), **changes)

    def judge(self, rows: list[int] | None = None, **changes: Any) -> Judged:
        """Of what was inspected last."""
        digest = blake3((self.folder / "canonical").read_bytes()).digest()
        return self.judge_canonical(digest, rows, **changes)

    def judge_canonical(
        self, digest: bytes, rows: list[int] | None = None, **changes: Any
    ) -> Judged:
        job = Judge(
            order=self.order(**changes),
            path=str(self.folder / "canonical"),
            digest=digest,
            thresholds=THRESHOLDS,
            rewards=[],
            rows=rows,
        )
        return trio.run(self.prefill.judge, job)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    demo.make_policy(folder, seed=1)
    return folder


@pytest.fixture(scope="session")
def stage(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    engine, inspector, prefill = (
        EngineService(InferenceSetup(environments=[])),
        InspectorService(InspectionSetup(environments=[])),
        PrefillService(PrefillSetup()),
    )
    load(engine, policy)
    trio.run(prefill.load, Load(policy=ORDER.policy, folder=str(policy)))
    with in_background(inspector.run) as ask:
        yield Stage(policy, tmp_path_factory.mktemp("stage"), engine, inspector, prefill, ask)
