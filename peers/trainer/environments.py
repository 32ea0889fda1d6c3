"""What a trainer measures of each environment of a run. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from peers.environments.collection import labels
from peers.trainer.pool import SPREAD_MIN, Accepted, environment_of
from swarm.rollouts.rollouts import mean_parts, parts_in
from swarm.wire.manifest import EnvironmentReference
from swarm.wire.messages import Verdict

EnvironmentFigures = dict[str, dict[str, float]]
"""Figures by name, by the environment's label."""


def environment_figures(
    batch: Sequence[Accepted],
    group_tokens: Sequence[Sequence[int]],
    environments: Sequence[EnvironmentReference],
) -> EnvironmentFigures:
    """Figures of each environment that a batch has groups of; groups left out count, too, those
    that continue states excepted.

    `group_tokens`: [submissions][groups] completion tokens, or nothing if they are unknown.
    pass_at_1 is the share of right completions and pass_at_g that of groups with a right one, where
    a completion is right if its task reward is 1; both are of graded groups, as the reward is. With
    a length penalty a verdict has only mean and spread of a group's task rewards: these figures
    then are exact for rewards of 0 and 1. part_NAME is the mean of a part of the rewards.
    """
    gathered: dict[int, list[tuple[Accepted, int, int | None]]] = {}
    for number, accepted in enumerate(batch):
        for group in range(len(accepted.verdict.rewards)):
            if accepted.verdict.continues(group):
                continue  # it begins within a rollout
            tokens = group_tokens[number][group] if group_tokens else None
            index = environment_of(accepted.verdict, group)
            gathered.setdefault(index, []).append((accepted, group, tokens))
    names = labels(environments)
    return {names[index]: _figures(groups) for index, groups in sorted(gathered.items())}


def _figures(groups: Sequence[tuple[Accepted, int, int | None]]) -> dict[str, float]:
    count = len(groups)
    labels = [accepted.labels[group] for accepted, group, _ in groups]
    found = {
        "groups": float(count),
        "keep_rate": labels.count("kept") / count,
        "quarantine_rate": labels.count("quarantined") / count,
    }
    tokens = [each for _, _, each in groups if each is not None]
    if tokens:
        completions = sum(len(accepted.verdict.rewards[group]) for accepted, group, _ in groups)
        found["completion_length"] = sum(tokens) / completions
    graded = [
        (accepted.verdict, group)
        for (accepted, group, _), label in zip(groups, labels, strict=True)
        if label != "quarantined"
    ]
    return {**found, **_reward_figures(graded)} if graded else found


def _reward_figures(groups: Sequence[tuple[Verdict, int]]) -> dict[str, float]:
    """Figures of graded groups."""
    rewards = [verdict.rewards[group] for verdict, group in groups]
    shares = [_right(verdict, group) for verdict, group in groups]
    parts = mean_parts(
        each
        for verdict, group in groups
        for each in parts_in(verdict.parts, verdict.rewards, group)
    )
    return {
        "reward": sum(map(sum, rewards)) / sum(map(len, rewards)),
        "pass_at_1": sum(share for share, _ in shares) / len(groups),
        "pass_at_g": sum(any_right for _, any_right in shares) / len(groups),
        **{f"part_{name}": mean for name, mean in parts.items()},
    }


def _right(verdict: Verdict, group: int) -> tuple[float, bool]:
    """(share of right completions, whether there is any)."""
    if verdict.task_means:
        mean, spread = verdict.task_means[group], verdict.task_spreads[group]
        return mean, max(mean, spread) >= 1 - SPREAD_MIN
    right = [reward >= 1 - SPREAD_MIN for reward in verdict.rewards[group]]
    return sum(right) / len(right), any(right)
