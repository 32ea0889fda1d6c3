"""A model learns to use a tool: episodes of two turns, through worker, validator and trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peers.demo.recipes import Warmup
from peers.demo.warmup import warm_up
from peers.engines import demo
from peers.environments.calculator import Calculator, CalculatorOptions
from swarm.jobs.training import TrainingTerms
from swarm.wire.manifest import EnvironmentReference, Objective, Optimiser, Sampling, Schedule
from tests.end_to_end.pipeline import pipeline

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
LESSONS = TrainingTerms(
    objective=Objective(epsilon=0.2, delta=4.0, kl_coefficient=0.0, entropy_coefficient=0.0),
    optimiser=Optimiser(learning_rate=2e-3, warmup_steps=2, gradient_norm_max=0.5),
    schedule=Schedule(steps=100, groups_per_step=GROUPS),
    sampling=SAMPLING,
)
STEPS = 18
WARMUP = Warmup(accuracy=0.15, batch=64)
"""After it the policy calls the tool in about half of its episodes."""


@pytest.mark.slow
def test_a_model_learns_to_use_a_tool(tmp_path: Path) -> None:
    demo.make_policy(tmp_path / "0", seed := 3)
    warm_up(tmp_path / "0", [Calculator(CalculatorOptions(digits=1))], seed, WARMUP)
    with pipeline(tmp_path, ENVIRONMENT, LESSONS) as run:
        figures = [run.take_step(step) for step in range(STEPS)]
    assert run.learned_steps == STEPS
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
