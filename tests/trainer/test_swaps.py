"""Rollouts that several policies sampled: whose log-probabilities and whose age count."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks.groups import Group, as_accepted
from peers.learning.batch import AcceptedGroups
from peers.learning.learner import Learner
from swarm.rollouts.rollout import Rollout, Span
from tests.trainer.test_learner import SETTINGS, random_groups


def swapped(rollout: Rollout, policies: tuple[int, ...]) -> Rollout:
    """The rollout with one token of each policy but the last, which sampled the rest."""
    prompt, model = rollout.segments
    count = len(model.tokens)
    lengths = [min(1, count - index) for index in range(len(policies) - 1)]
    lengths.append(count - sum(lengths))
    pairs = zip(policies, lengths, strict=True)
    spans = tuple(Span(policy, length) for policy, length in pairs if length > 0)
    return Rollout((prompt, dataclasses.replace(model, spans=spans)))


def groups(policies: tuple[int, ...]) -> list[Group]:
    """The same texts whatever policies are said to have sampled them."""
    return [
        dataclasses.replace(
            group, rollouts=[swapped(each, policies) for each in group.rollouts], policy=policies[0]
        )
        for group in random_groups(3, policy=0)
    ]


def scored(learner: Learner, policies: tuple[int, ...]) -> AcceptedGroups:
    (given,) = as_accepted(groups(policies))
    learner.score([given])
    return given


@pytest.fixture
def learner(base: Path) -> Learner:
    """At step 2, so that policies 0, 1 and 2 are held."""
    learner = Learner(base, SETTINGS)
    for step in (0, 1):
        learner.train_step(as_accepted(random_groups(step, policy=0)), step)
    return learner


def test_each_span_is_scored_by_its_own_policy(learner: Learner) -> None:
    first, second = (scored(learner, (policy,)).log_mu for policy in (0, 1))
    assert first is not None and second is not None and not torch.allclose(first, second)
    given = scored(learner, (0, 1))
    assert given.policies == [0, 1] and given.oldest == 0 and given.log_mu is not None
    own = given.token_policies == 0
    assert own.any() and (~own).any()
    assert torch.equal(given.log_mu, torch.where(own, first, second))


def test_the_learners_own_tokens_are_left_to_the_training_pass(learner: Learner) -> None:
    """On-policy tokens have a ratio of 1, the other tokens of the same rollout have not."""
    given = scored(learner, (1, 2))
    assert given.scored == {1} and given.log_mu is not None
    assert not given.log_mu[given.token_policies == 2].any()
    mixed = learner.train_step([given], 2)
    assert mixed["ratio"] != pytest.approx(1, abs=1e-6)
    assert mixed["age"] == 1, "the oldest span's"
    later = scored(learner, (1, 2))  # policy 2 is a past one now
    assert later.scored == {1, 2} and later.log_mu is not None
    assert later.log_mu[later.token_policies == 2].all()


def test_a_span_of_a_policy_that_is_not_held_is_refused(learner: Learner) -> None:
    with pytest.raises(ValueError, match="policy 3 has age -1 at step 2"):
        learner.train_step(as_accepted(groups((1, 3))), 2)
    for step in (2, 3, 4):
        learner.train_step(as_accepted(random_groups(step, policy=step)), step)
    with pytest.raises(ValueError, match="policy 2 has age 3 at step 5"):
        learner.train_step(as_accepted(groups((2, 5))), 5)
