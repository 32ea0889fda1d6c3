"""Figures of each environment: entropy, KL to the sampler, length, repetition, truncation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks.groups import Group, as_accepted
from peers.learning.learner import Learner
from peers.learning.ranks import Ranks
from swarm.rollouts.rollout import Rollout
from tests.trainer.ranks_harness import run_ranks
from tests.trainer.test_learner import SETTINGS, random_groups

LOOPS = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
"""Seven runs of four tokens, of which the last three have occurred before."""


def mixture(policy: int = 0) -> list[Group]:
    """Three groups of random answers, and one that loops until the limit cuts it off."""
    looping = Group(
        [
            Rollout.single_turn([4, 5], LOOPS, finish="length"),
            Rollout.single_turn([4, 5], [9, 2], finish="stop"),
        ],
        rewards=[0.0, 1.0],
        policy=policy,
        environment=1,
    )
    return [*random_groups(3, policy=policy), looping]


def learnt(base: Path, groups: list[Group], ranks: Ranks | None = None) -> tuple[Any, Any]:
    learner = Learner(base, SETTINGS, ranks=ranks)
    for step in range(2):  # the second one is a step off the sampler
        metrics = learner.train_step(as_accepted(groups, "a", ranks), step)
    return metrics, learner.environments


def test_each_environment_has_its_own(base: Path) -> None:
    metrics, environments = learnt(base, mixture())
    first, second, *others = environments
    assert not any(others)
    assert (second["repetition"], second["truncated"]) == (3 / 7, 0.5)
    assert second["completion_length"] == 6.0
    assert first["truncated"] == 0.0
    apart = [learnt(base, [g for g in mixture() if g.environment == index]) for index in (0, 1)]
    for own, (alone, _) in zip((first, second), apart, strict=True):
        assert own["completion_length"] == pytest.approx(alone["completion_length"])
        assert own["repetition"] == pytest.approx(alone["repetition"])
    assert metrics["truncated"] == pytest.approx(1 / 18)
    # Entropy and KL of the batch are means over the tokens that were trained on.
    trained = [g for g in mixture() if max(g.rewards) > min(g.rewards)]
    tokens = [
        sum(
            len(each.model_tokens) for g in trained if g.environment == index for each in g.rollouts
        )
        for index in (0, 1)
    ]
    for name in ("entropy", "kl_generation"):
        mean = (first[name] * tokens[0] + second[name] * tokens[1]) / sum(tokens)
        assert metrics[name] == pytest.approx(mean, rel=1e-4) and first[name] != second[name]
        assert metrics[name] > 0


def test_what_was_not_trained_on_counts_in_length_and_truncation(base: Path) -> None:
    """An environment whose answers are all cut off earns nothing, and so teaches nothing."""
    lost = dataclasses.replace(mixture()[-1], rewards=[0.0, 0.0])
    _, environments = learnt(base, [*mixture()[:-1], lost])
    assert environments[1] == {"completion_length": 6.0, "truncated": 0.5}


@pytest.mark.slow
def test_ranks_add_up(base: Path, tmp_path: Path) -> None:
    _, alone = learnt(base, mixture())
    for _, found in run_ranks(2, tmp_path, lambda ranks: learnt(base, mixture(), ranks)):
        for own, expected in zip(found[:2], alone[:2], strict=True):
            assert own == pytest.approx(expected, rel=1e-4)
