"""Attacks on text: a real model, and the chain from a worker's file to its evidence.

A cheat (`tests.attacks.cheats`, or any function of the work) hands in completions and proofs
for the work that its order gives. The inspector and the prefill service judge its files in order,
and its evidence adds up as in a validator, until it would be evicted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import trio
from blake3 import blake3

from peers.calibration.calibrate import EngineClass
from peers.calibration.work import HandedIn
from peers.demo.recipes import ENVIRONMENT, OPTIMISER, SAMPLING, THRESHOLDS, Warmup
from peers.demo.warmup import warm_up
from peers.engines.demo import make_policy
from peers.engines.model import read_weights
from peers.engines.native import NativeEngine
from peers.engines.service import EngineService
from peers.environments import Renderer
from peers.environments import load as load_environment
from peers.environments.prompt_room import PromptRoom
from peers.validator.cases import Outcome
from peers.validator.inspector import InspectorService
from peers.validator.prefill import PrefillService
from swarm.jobs import Load, SubmissionOrder
from swarm.jobs.inference import InferenceSetup
from swarm.jobs.validation import InspectionSetup, Judge, Judged, PrefillSetup
from swarm.ledger.evidence import WorkerEvidence
from swarm.rollouts.rollout import Rollout
from swarm.rollouts.rollouts import Rollouts, Row
from swarm.rollouts.submission_file import Header, ReadLimits, read
from swarm.wire.manifest import Sampling
from tests.attacks.cheats import Generates, Work, Worker, work_of
from tests.attacks.weights import Change, write_changed
from tests.background import Ask
from tests.orders import ORDER, submission_order
from tests.rollouts.harness import single_turns
from tests.validator.conftest import Stage, generate

LIMITS = ReadLimits(1 << 20, 1 << 10, 1 << 10, 1 << 10, 1 << 10)
FP32 = EngineClass("float32", "cpu")
PREVIOUS = (1, 2, 5)
"""Ages of the previous policies, in optimiser steps at the demo's learning rate."""

WARMUP = Warmup(batch=32, steps_max=60)
"""Enough for a policy with likely and unlikely tokens."""
STEPS = {
    steps: Warmup(
        learning_rate=OPTIMISER.learning_rate,
        warmup_steps=1,
        batch=32,
        accuracy=2.0,  # is never reached
        steps_max=steps,
    )
    for steps in (3, 4, 5)
}
"""Optimiser steps as large as the demo's in RL."""

Cheats = Callable[[Work, Sampling, SubmissionOrder], HandedIn]
"""What a cheat hands in, if it needs the order too."""


@dataclass
class Met:
    """What a worker met with, submission by submission, while every one was recomputed."""

    judged: list[Judged | Outcome] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    """First check failed, by submissions; "" counts accepted ones."""
    tokens: int = 0
    """Tokens handed in until the eviction, or in all."""
    evicted_by: str = ""
    """"proven", or the process whose evidence evicted; empty if nothing did."""
    reward: float = 0.0
    """Mean reward of what was handed in, whether accepted or not."""
    accepted: int = 0
    """Submissions accepted before the eviction."""
    submissions: int = 0

    @property
    def refused(self) -> int:
        return self.submissions - self.failed[""]


@dataclass
class Arena:
    """A trained policy, its predecessors, and a validator that recomputes everything."""

    stage: Stage
    previous: dict[int, Path]
    """Earlier policies by age in steps."""
    aside: Path
    engine: NativeEngine
    """The policy, for cheats that prove honestly."""

    def order(self, number: int, **changes: Any) -> SubmissionOrder:
        return submission_order(_BASE, number=number, **changes)

    def work(self, order: SubmissionOrder) -> Work:
        """The prompts that an order gives, and the rewards that a cheat is after."""
        environment = load_environment(ENVIRONMENT.name, ENVIRONMENT.version)
        renderer = Renderer(self.stage.policy)
        tasks = self.stage.engine._environments.tasks(order, PromptRoom(renderer))
        drawn = [(environment, each.task, each.tokens) for each in tasks if each is not None]
        return work_of(order.seed(), drawn, renderer, order.sampling)

    def honest_file(self, order: SubmissionOrder) -> tuple[Header, Rollouts]:
        """What the honest engine hands in."""
        path = self.stage.folder / "honest"
        generate(self.stage.engine, path, order)
        return self.read(path)[::-1]

    def read(self, path: Path) -> tuple[Rollouts, Header]:
        """A submission's file."""
        found = read(path, LIMITS)
        return found.rollouts, found.header

    @staticmethod
    def rows(rollouts: Rollouts) -> list[Row]:
        return [
            Row(
                int(rollouts.group[row]),
                int(rollouts.sample[row]),
                int(rollouts.environment[row]),
                rollouts.rollout(row),
                rollouts.proof(row),
            )
            for row in range(len(rollouts))
        ]

    def with_completion(self, order: SubmissionOrder, row: int, completion: list[int]) -> Rollouts:
        """An honest submission with another completion in one row."""
        rows = self.rows(self.honest_file(order)[1])
        rows[row] = row_of(rows[row], completion=completion, stop_ids=order.sampling.stop_ids)
        return Rollouts.from_rows(rows)

    def rollouts(self, work: Work, order: SubmissionOrder, handed_in: HandedIn) -> Rollouts:
        size, rows = order.sampling.group_size, range(order.rows())
        return single_turns(
            group=[row // size for row in rows],
            sample=[row % size for row in rows],
            stop_ids=order.sampling.stop_ids,
            prompts=work.prompts,
            completions=handed_in.completions,
            proofs=[b"".join(proofs) for proofs in handed_in.proofs],
            policy=order.policy.step,
        )

    def judge(
        self, order: SubmissionOrder, rollouts: Rollouts, header: Header | None = None
    ) -> tuple[Outcome, Judged | None]:
        """Inspect and, unless the file has a proven fault, recompute a submission."""
        found = self.stage.inspect(
            header or self.stage.engine._header(order), rollouts, **_changes(order)
        )
        if found.failed:
            return found, None
        raw = (self.stage.folder / "canonical").read_bytes()
        job = Judge(
            order=order,
            path=str(self.stage.folder / "canonical"),
            digest=blake3(raw).digest(),
            thresholds=THRESHOLDS,
            rewards=found.rewards,
        )
        return found, trio.run(self.stage.prefill.judge, job)

    def meets(
        self, worker: Worker | Cheats, numbers: Iterable[int] = range(6), **changes: Any
    ) -> Met:
        """Let a worker hand in submissions until it is evicted; every one is recomputed."""
        met, evidence = Met(), WorkerEvidence()
        rewards: list[float] = []
        for number in numbers:
            order = self.order(number, **changes)
            work = self.work(order)
            handed_in = (
                worker(work, order.sampling, order)
                if callable(worker)
                else worker.submit(work, order.sampling)
            )
            rollouts = self.rollouts(work, order, handed_in)
            found, judged = self.judge(order, rollouts)
            met.submissions += 1
            met.tokens += sum(map(len, handed_in.completions))
            rewards += map(work.rewards, range(order.rows()), handed_in.completions)
            met.judged.append(judged or found)
            met.failed[met.judged[-1].failed] += 1
            met.accepted += met.judged[-1].failed == ""
            if judged is None:
                met.evicted_by = "proven" if found.proven_fault else ""
            else:
                evidence.add("validator", judged.evidence)
                standing = evidence.standing()
                if standing.p_value <= THRESHOLDS.eviction_p_value:
                    met.evicted_by = standing.process
            if met.evicted_by:
                break
        met.reward = sum(rewards) / len(rewards)
        return met

    @cached_property
    def honest(self) -> Met:
        """What an honest worker beside a cheat meets with."""
        return self.meets(Generates(self.engine))

    def meets_honestly(self, numbers: range) -> Met:
        """What honest work of the same numbers meets with."""
        return self.meets(Generates(self.engine), numbers)

    @staticmethod
    def recomputed(met: Met) -> list[Judged]:
        """The submissions that were recomputed."""
        return [judged for judged in met.judged if isinstance(judged, Judged)]

    def evicts(
        self, worker: Worker | Cheats, tokens: int, *by: str, submissions: int = 12, **changes: Any
    ) -> Met:
        """Assert that a cheat is evicted within `tokens`, and that honest work is accepted."""
        met = self.meets(worker, range(submissions), **changes)
        assert met.evicted_by and met.tokens <= tokens, met
        assert not by or met.evicted_by in by, met.evicted_by
        self.accepts_honest_work()
        return met

    def accepts_honest_work(self) -> None:
        """Assert that an honest worker of the same policy is neither refused nor evicted."""
        assert self.honest.refused == 0 and not self.honest.evicted_by, self.honest

    def proves_fault(self, check: str, rollouts: Rollouts, order: SubmissionOrder) -> None:
        """Assert that a file has a fault that anybody can recompute."""
        found, _ = self.judge(order, rollouts)
        assert (found.failed, found.proven_fault) == (check, True), found.detail
        self.accepts_honest_work()

    def changed(self, change: Change, name: str) -> NativeEngine:
        """An engine with a changed copy of the policy's weights."""
        return FP32.engine(write_changed(self.stage.policy, self.aside / name, change))


_BASE = submission_order(
    sampling=SAMPLING, groups=SAMPLING.groups_per_submission, environments=[ENVIRONMENT]
)


def row_of(
    row: Row,
    *,
    group: int | None = None,
    prompt: list[int] | None = None,
    completion: list[int] | None = None,
    stop_ids: Sequence[int] = SAMPLING.stop_ids,
) -> Row:
    """A row with something changed."""
    before = row.rollout
    tokens = completion or before.model_tokens
    rollout = Rollout.single_turn(
        prompt or before.tokens[: len(before.tokens) - len(before.model_tokens)],
        tokens,
        finish="stop" if tokens[-1] in stop_ids else "length",
        policy=ORDER.policy.step,
        log_probabilities=[-1.0] * len(tokens),
    )
    changed = row.group if group is None else group
    return Row(changed, row.sample, row.environment, rollout, row.proof)


def without_last_layer(arena: Arena) -> Path:
    """The policy's folder with a layer less."""
    folder = arena.aside / "cut"
    folder.mkdir(exist_ok=True)
    config = json.loads((arena.stage.policy / "config.json").read_text())
    last = config["num_hidden_layers"] = config["num_hidden_layers"] - 1
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:last]
    (folder / "config.json").write_text(json.dumps(config))
    kept = {
        name: weight
        for name, weight in read_weights(arena.stage.policy).items()
        if f".layers.{last}." not in name
    }
    safetensors.torch.save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _changes(order: SubmissionOrder) -> dict[str, Any]:
    """An order as the changes that `Stage` applies to its own."""
    return {name: getattr(order, name) for name in SubmissionOrder.__struct_fields__}


def train(folder: Path) -> dict[int, Path]:
    """Train a policy on the demo's task, and some steps more; return the policies by age."""
    environment = load_environment(ENVIRONMENT.name, ENVIRONMENT.version)
    base = folder / "base"
    make_policy(base, seed=1)
    warm_up(base, [environment], seed=1, recipe=WARMUP)
    ages = {}
    for age in (0, *PREVIOUS):
        ages[age] = folder / f"age-{age}"
        ages[age].mkdir()
        for file in base.iterdir():
            (ages[age] / file.name).write_bytes(file.read_bytes())
        steps = max(PREVIOUS) - age
        if steps:
            warm_up(ages[age], [environment], seed=2, recipe=STEPS[steps])
    return ages


def arena(ages: dict[int, Path], folder: Path, ask_of: Callable[[InspectorService], Ask]) -> Arena:
    """Make an arena; `ask_of` runs an inspector and asks it."""
    engine, inspector = (
        EngineService(InferenceSetup(environments=[ENVIRONMENT])),
        InspectorService(InspectionSetup(environments=[ENVIRONMENT])),
    )
    prefill = PrefillService(PrefillSetup())
    job = Load(policy=ORDER.policy, folder=str(ages[0]))
    trio.run(engine.load, job)
    trio.run(prefill.load, job)
    stage = Stage(ages[0], folder, engine, inspector, prefill, ask_of(inspector))
    older = {age: path for age, path in ages.items() if age}
    return Arena(stage, older, folder, FP32.engine(ages[0]))
