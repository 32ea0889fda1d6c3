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

from peers.inference.engine_service import EngineService
from peers.policy import demo
from peers.validator.inspector import InspectorService
from peers.validator.prefill import PrefillService
from swarm.identity import Identity
from swarm.jobs import Generate, Load, SubmissionOrder
from swarm.messages import Thresholds
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.seeds import submission_seed
from swarm.rollouts.submission_file import Header, ReadLimits, read, write
from tests.orders import ORDER, submission_order

torch.set_num_threads(1)  # two OpenMP threads on shared cores are many times slower

THRESHOLDS = {name: getattr(Thresholds(), name) for name in Thresholds.__struct_fields__}
STOP_IDS = [2, *range(40, 52)]
"""Many, so that a policy with random weights stops often."""


def load(engine: EngineService, folder: Path) -> None:
    trio.run(engine.load, Load(policy=ORDER.policy, folder=str(folder)))


def generate(engine: EngineService, path: Path, order: SubmissionOrder) -> None:
    trio.run(engine.generate, Generate(order=order, path=str(path)))


@dataclasses.dataclass
class Stage:
    """A policy, a worker, a validator, and the facts that both sides know."""

    policy: Path
    folder: Path
    engine: EngineService
    inspector: InspectorService
    prefill: PrefillService

    def order(self, **changes: Any) -> SubmissionOrder:
        return submission_order(**{"stop_ids": STOP_IDS, **changes})

    def facts(self, **changes: Any) -> dict[str, Any]:
        return {
            "run": "owner/run",
            "lineage": 0,
            "step": 3,
            "policy": 1,
            "nonce": bytes(32),
            "worker": Identity(bytes(32)).peer_id,
            "number": 0,
            "groups": 4,
            "group_size": 4,
            "environment": "sort-digits",
            "environment_version": "1",
            "temperature": 1.0,
            "max_new_tokens": 8,
            "stop_ids": STOP_IDS,
        } | changes

    def seed(self, **changes: Any) -> bytes:
        facts = self.facts(**changes)
        return submission_seed(facts["run"], facts["nonce"], facts["worker"], facts["number"])

    def generate(self, **changes: Any) -> tuple[Header, Rollouts]:
        """An honest submission's content."""
        path = self.folder / "generated"
        generate(self.engine, path, self.order(**changes))
        found = read(path, ReadLimits(1 << 20, 1 << 10, 1 << 10, 1 << 10))
        return found.header, found.rollouts

    def inspect_bytes(self, raw: bytes, **changes: Any) -> dict[str, Any]:
        path = self.folder / "pushed"
        path.write_bytes(raw)
        return self.inspector.inspect(
            path=str(path),
            digest=blake3(raw).digest(),
            out_path=str(self.folder / "canonical"),
            tokenizer_folder=str(self.policy),
            bytes_max=1 << 20,
            **self.facts(**changes),
        )

    def inspect(self, header: Header, rollouts: Rollouts, **changes: Any) -> dict[str, Any]:
        write(self.folder / "aside", rollouts, header)
        return self.inspect_bytes((self.folder / "aside").read_bytes(), **changes)

    def judge(self, rows: list[int] | None = None, **changes: Any) -> dict[str, Any]:
        """Of what was inspected last."""
        path = self.folder / "canonical"
        return self.prefill.judge(
            path=str(path),
            digest=blake3(path.read_bytes()).digest(),
            policy=1,
            seed=self.seed(**changes),
            temperature=1.0,
            thresholds=THRESHOLDS,
            rows=rows,
        )


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    demo.make_policy(folder, seed=1)
    return folder


@pytest.fixture(scope="session")
def stage(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    engine, inspector, prefill = EngineService(), InspectorService(), PrefillService()
    load(engine, policy)
    prefill.load(1, str(policy))
    yield Stage(policy, tmp_path_factory.mktemp("stage"), engine, inspector, prefill)
    inspector.close()
