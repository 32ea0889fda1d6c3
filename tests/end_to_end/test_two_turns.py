"""A model learns to use a tool: episodes of two turns, through worker, validator and trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import trio
from blake3 import blake3

from benchmarks.turns import make_tool_policy
from peers.engines import demo
from peers.inference.engine_service import EngineService
from peers.trainer.service import TrainerService
from peers.validator.inspector import InspectorService
from peers.validator.prefill import PrefillService
from swarm.identity import Identity
from swarm.jobs import Load, SubmissionOrder
from swarm.jobs.inference import Generate, InferenceSetup
from swarm.jobs.training import AcceptedSubmission, Export, Lessons, StartTraining, TrainStep
from swarm.jobs.validation import Inspect, Inspected, InspectionSetup, Judge, PrefillSetup
from swarm.manifest import (
    EnvironmentReference,
    Objective,
    Optimiser,
    Sampling,
    Schedule,
    Thresholds,
)
from swarm.messages import CheckpointReference
from swarm.rollouts.rollouts import Rollouts
from tests.background import Ask, in_background

torch.set_num_threads(1)  # two OpenMP threads on shared cores are many times slower

ENVIRONMENT = EnvironmentReference(name="calculator", version="1", options={"digits": 1})
GROUPS = 24
SAMPLING = Sampling(
    temperature=1.0,
    max_new_tokens=16,
    stop_ids=[demo.EOS_ID],
    group_size=8,
    groups_per_submission=GROUPS,
)
LESSONS = Lessons(
    objective=Objective(epsilon=0.2, delta=4.0, kl_coefficient=0.0, entropy_coefficient=0.0),
    optimiser=Optimiser(learning_rate=2e-3, warmup_steps=2, gradient_norm_max=0.5),
    schedule=Schedule(steps=100, groups_per_step=GROUPS),
    sampling=SAMPLING,
)
STEPS = 18


@dataclass
class Pipeline:
    """The work of worker, validator and trainer on one submission, in turn."""

    folder: Path
    engine: EngineService
    inspector: InspectorService
    prefill: PrefillService
    trainer: TrainerService
    ask: Ask
    """Awaits a method of the inspector."""

    def take_step(self, step: int) -> tuple[float, float, Rollouts]:
        """Generate a step's rollouts: (mean reward, share of episodes with two turns, rollouts)."""
        policy = CheckpointReference(lineage=0, step=step, digest=bytes(32), size_bytes=1)
        published = str(self.folder / str(step))
        trio.run(self.engine.load, Load(policy=policy, folder=published))
        trio.run(self.prefill.load, Load(policy=policy, folder=published))
        order = SubmissionOrder(
            run="owner/tools",
            policy=policy,
            step=step,
            nonce=blake3(b"step %d" % step).digest(),
            worker=Identity(bytes(32)).peer_id,
            number=0,
            groups=GROUPS,
            environments=[ENVIRONMENT],
            sampling=SAMPLING,
        )
        file, canonical = self.folder / "file", self.folder / "canonical"
        made = trio.run(self.engine.generate, Generate(order=order, path=str(file)))
        inspected = self.ask(
            self.inspector.inspect,
            Inspect(
                order=order,
                path=str(file),
                digest=made.digest,
                canonical_path=str(canonical),
                tokenizer_folder=published,
                bytes_max=1 << 24,
            ),
        )
        assert inspected.failed == "", inspected.detail
        judged = trio.run(
            self.prefill.judge,
            Judge(
                order=order,
                path=str(canonical),
                digest=inspected.canonical_digest,
                thresholds=Thresholds(),
                rewards=[],
            ),
        )
        assert judged.failed == "", judged.detail
        assert (judged.sampling.tokens, judged.sampling.mismatches) == (made.tokens, 0)
        self._train(step, inspected, made.digest, canonical)
        rollouts = Rollouts.from_bytes(canonical.read_bytes())
        rewards = [reward for group in inspected.rewards for reward in group]
        two_turns = (rollouts.segment_counts() == 4).mean()
        return sum(rewards) / len(rewards), float(two_turns), rollouts

    def _train(self, step: int, inspected: Inspected, digest: bytes, canonical: Path) -> None:
        accepted = AcceptedSubmission(
            digest=digest,
            path=str(canonical),
            rollouts_digest=blake3(canonical.read_bytes()).digest(),
            policy=step,
            rewards=inspected.rewards,
            sampling=SAMPLING,
            kept=[True] * GROUPS,
        )
        trained = trio.run(self.trainer.train, TrainStep(step=step, submissions=[accepted]))
        assert trained.unreadable == []
        assert trained.figures["engine_log_probability_difference"] < 1e-3
        trio.run(self.trainer.export, Export(folder=str(self.folder / str(step + 1))))


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    base = tmp_path / "0"
    make_tool_policy(base, seed=3)
    inspector, trainer = (
        InspectorService(InspectionSetup(environments=[ENVIRONMENT])),
        TrainerService(),
    )
    trio.run(
        trainer.start,
        StartTraining(model=str(base), lessons=LESSONS, environments=[ENVIRONMENT], seed=0),
    )
    engine, prefill = (
        EngineService(InferenceSetup(environments=[ENVIRONMENT])),
        PrefillService(PrefillSetup()),
    )
    with in_background(inspector.run) as ask:
        yield Pipeline(tmp_path, engine, inspector, prefill, trainer, ask)


@pytest.mark.slow
def test_a_model_learns_to_use_a_tool(pipeline: Pipeline) -> None:
    figures = [pipeline.take_step(step) for step in range(STEPS)]
    rewards = [reward for reward, _, _ in figures]
    before, after = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
    assert 0.02 < before < 0.5
    assert after > before + 0.2
    assert figures[-1][1] > figures[0][1], "more episodes call the tool"
    rollouts = figures[-1][2]
    lengths = rollouts.model_lengths()
    assert len(rollouts.tokens) > lengths.sum() + sum(
        len(rollouts.prompt(row)) for row in range(len(rollouts))
    ), "the tool's answers are in the sequences, and are not learned"
