"""What fixed policies say of a batch."""

from __future__ import annotations

from pathlib import Path

import torch

from peers.trainer.learning.learner import Learner
from peers.trainer.learning.scoring import score
from tests.trainer.test_learner import SETTINGS, random_groups


def test_for_on_policy_tokens_the_training_pass_says_what_a_pass_of_their_own_would(
    base: Path,
) -> None:
    learner = Learner(base, SETTINGS)
    learner.train_step(random_groups(1, policy=0), 0)
    groups = [*random_groups(2, policy=0), *random_groups(3, policy=1)]
    expected = score(groups, learner.policy, learner.past, SETTINGS)
    found = score(groups, learner.policy, learner.past, SETTINGS, current=1)
    assert not expected.on_policy.any()
    assert found.on_policy.tolist() == found.batch.per_token(found.batch.policy).eq(1).tolist()
    for rows in found.passes:
        tokens = found.tokens(rows, *learner.policy.scorer(rows))
        assert not tokens.log_mu.requires_grad
        torch.testing.assert_close(tokens.log_mu, expected.log_mu[rows.index], atol=2e-6, rtol=0)
    torch.testing.assert_close(found.log_mu, expected.log_mu, atol=2e-6, rtol=0)
