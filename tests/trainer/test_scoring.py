"""What fixed policies say of a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.groups import as_accepted
from peers.learning.advantages import advantages as advantages_of
from peers.learning.learner import Learner
from peers.learning.scoring import ScoredBatch, assemble, completions_of, score
from tests.trainer.test_learner import SETTINGS, random_groups, same, settings, teach, weights_of


def test_for_on_policy_tokens_the_training_pass_says_what_a_pass_of_their_own_would(
    base: Path,
) -> None:
    learner = Learner(base, SETTINGS)
    teach(learner, random_groups(1, policy=0), 0)
    groups = [*random_groups(2, policy=0), *random_groups(3, policy=1)]

    def batch(step: int, current: int | None) -> ScoredBatch:
        given = as_accepted(groups)
        score(given, learner.policy, learner.past, SETTINGS, step)
        part = [(each, each.informative) for each in given]
        return assemble(part, learner.policy, SETTINGS, current=current)

    expected, found = batch(9, None), batch(1, 1)
    assert not expected.on_policy.any()
    assert found.on_policy.any() and not found.on_policy.all()
    assert not found.log_mu[found.on_policy].any()
    for rows in found.passes:
        tokens = found.tokens(rows, *learner.policy.scorer(rows))
        assert not tokens.log_mu.requires_grad
        torch.testing.assert_close(tokens.log_mu, expected.log_mu[rows.index], atol=2e-6, rtol=0)
    torch.testing.assert_close(found.log_mu, expected.log_mu, atol=2e-6, rtol=0)


def test_groups_scored_ahead_teach_the_same_to_the_last_bit(base: Path) -> None:
    """Also those that wait for a later step, and those of several optimiser steps."""
    for changes in ({}, {"optimiser_steps": 2}):
        chosen = settings(kl_coefficient=0.01, **changes)
        inside, ahead = Learner(base, chosen), Learner(base, chosen)
        taught = []
        for learner in (inside, ahead):
            waiting = as_accepted(random_groups(20, policy=0), "waits for step 2")
            metrics = []
            for step in range(3):
                given = as_accepted(random_groups(step, policy=max(0, step - 1)), str(step))
                if learner is ahead:
                    for each in (*waiting, *given):  # each when it arrives
                        learner.score([each])
                metrics.append(learner.train_step(given + waiting * (step == 2), step))
            taught.append(metrics)
        assert taught[0] == taught[1]
        assert same(weights_of(inside), weights_of(ahead))


def test_a_report_counts_only_near_the_trainers_own_value(base: Path) -> None:
    """So what a worker reports moves a token's importance weight by a bounded factor."""
    bound = 0.3
    groups = random_groups(2, policy=0)
    for behaviour in ("trainer", "engine"):
        chosen = replace(settings(behaviour=behaviour), log_difference_max=bound)
        learner = Learner(base, chosen)
        given = as_accepted(groups)
        score(given, learner.policy, learner.past, chosen, step=1)
        part = [(each, each.informative) for each in given]
        own = assemble(part, learner.policy, chosen).log_mu.clone()
        lies = torch.tensor([0.0, 0.29, -0.29, 0.31, -5.0, torch.nan]).repeat(len(own))[: len(own)]
        for each in given:
            assert each.log_mu is not None
            each.reported = each.log_mu + lies[: len(each.reported)]
        batch = assemble(part, learner.policy, chosen)
        for rows in batch.passes:
            tokens = batch.tokens(rows, *learner.policy.scorer(rows))
            here, lie = own[rows.index], batch.reported[rows.index] - own[rows.index]
            near = lie.abs() <= bound
            expected = torch.where(near, here + lie, here) if behaviour == "engine" else here
            torch.testing.assert_close(tokens.log_mu, expected, atol=1e-6, rtol=0)
            assert near.any() and not near.all()
            assert (tokens.log_mu - here).abs().max() <= bound + 1e-6
        assert torch.equal(batch.log_mu, own), "metrics compare with the trainer's own"


def test_a_token_can_have_an_advantage_of_its_own(base: Path) -> None:
    """Equal to its completion's it teaches the same; another one reaches its own token only."""
    learner = Learner(base, SETTINGS)
    given = as_accepted([*random_groups(1, policy=0), *random_groups(2, policy=0)])
    part = [(each, each.informative[1:]) for each in given]

    def advantages() -> torch.Tensor:
        return assemble(part, learner.policy, SETTINGS, current=0).advantage

    before = advantages()
    for each in given:
        some = completions_of([(each, each.informative)])
        whole = each.batch(each.informative)
        each.token_advantage = whole.per_token(advantages_of(SETTINGS.objective, some))
    assert torch.equal(advantages(), before)
    for each in given:
        assert each.token_advantage is not None
        each.token_advantage = torch.arange(len(each.token_advantage)).float()
    left_out = given[0].tokens_in(given[0].informative[:1])
    assert torch.equal(advantages(), torch.arange(left_out, left_out + len(before)).float())
