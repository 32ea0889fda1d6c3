"""Reading of accepted rollouts into groups that can be trained on."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from peers.trainer.learning.batch import Group
from swarm.jobs import AcceptedSubmission
from swarm.rollouts.rollouts import Rollouts, check_digest


def read_groups(submission: AcceptedSubmission, policies: Collection[int]) -> list[Group] | str:
    """The groups of an accepted submission, or the reason why they cannot be trained on.

    A trusted validator wrote these rollouts, but on another machine: the copy may be damaged.
    `policies`: the policies that the learner holds.
    """
    if submission.policy not in policies:
        return f"its policy {submission.policy} is not held here; held policies: {policies}"
    try:
        raw = Path(submission.path).read_bytes()
        check_digest(raw, submission.rollouts_digest)
        return _cut(Rollouts.from_bytes(raw), submission)
    except (OSError, ValueError) as error:
        return str(error)


def _cut(rollouts: Rollouts, submission: AcceptedSubmission) -> list[Group]:
    """Split the rows into groups; raises `ValueError` unless each row has exactly one reward."""
    rewards = submission.rewards
    if len(rollouts) != sum(map(len, rewards)):
        raise ValueError(f"{sum(map(len, rewards))} rewards for {len(rollouts)} rollouts")
    groups = []
    row = 0
    for group_rewards, keep in zip(rewards, submission.kept, strict=True):
        rows = range(row, row + len(group_rewards))
        groups.append(
            Group(
                [rollouts.rollout(each) for each in rows],
                group_rewards,
                submission.policy,
                kept=keep,
                temperature=submission.sampling.temperature,
            )
        )
        row = rows.stop
    return groups
