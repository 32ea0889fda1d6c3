"""What a trainer measures of each environment of a run: its level and its figures.

An environment's level follows the accuracy that the trainer measures. The trainer writes the levels
into each step's order; everyone else reads them there. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from peers.environments.collection import labels
from peers.trainer.pool import SPREAD_MIN, UNCOUNTED, Accepted, environment_of
from peers.trainer.progress import STEPS_REMEMBERED
from swarm.events import Events
from swarm.rollouts.rollouts import mean_parts, parts_in
from swarm.wire.manifest import EnvironmentReference, RunManifest
from swarm.wire.messages import StepOrder, Verdict

EnvironmentFigures = dict[str, dict[str, float]]
"""Figures by name, by the environment's label."""


class Curricula:
    """The levels of a run's environments, and the accuracy measured since they last moved."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._levels: list[int] = []
        """By environment; empty before the first change, and where no environment has a rule."""
        self._of_step: dict[int, list[int]] = {}
        self._measured: dict[int, list[float]] = {}
        """Mean task rewards of groups at the present level, by environment."""

    def restore(self, orders: Iterable[StepOrder]) -> None:
        """Continue from the orders of an earlier process, newest first."""
        for order in orders:
            if order.step not in self._of_step:
                self._of_step[order.step] = order.levels
        if self._of_step:
            self._levels = list(self._of_step[max(self._of_step)])

    def levels_for(self, step: int) -> list[int]:
        """The levels of a step that is opened now."""
        self._of_step[step] = list(self._levels)
        while len(self._of_step) > STEPS_REMEMBERED:
            del self._of_step[min(self._of_step)]
        return self._of_step[step]

    def level(self, index: int) -> int:
        return self._levels[index] if index < len(self._levels) else 0

    def levels_of(self, manifest: RunManifest) -> dict[str, int]:
        """The present level of each environment with a rule, by its label."""
        named = zip(labels(manifest.environments), manifest.environments, strict=True)
        return {
            label: self.level(index)
            for index, (label, each) in enumerate(named)
            if each.curriculum.levels
        }

    def observe(self, batch: Sequence[Accepted], manifest: RunManifest) -> None:
        """Measure the groups of a trained batch that were drawn at the present levels, and move."""
        for accepted in batch:
            for group, label in enumerate(accepted.labels):
                if label in UNCOUNTED:
                    continue
                index = environment_of(accepted.verdict, group)
                if index >= len(manifest.environments):
                    continue
                drawn = self._of_step.get(accepted.verdict.step, [])
                then = drawn[index] if index < len(drawn) else 0
                if manifest.environments[index].curriculum.levels and then == self.level(index):
                    self._measured.setdefault(index, []).append(_mean(accepted.verdict, group))
        for index in sorted(self._measured):
            self._move(index, manifest)

    def _move(self, index: int, manifest: RunManifest) -> None:
        rule = manifest.environments[index].curriculum
        measured = self._measured[index]
        if len(measured) < rule.groups:
            return
        accuracy, before = sum(measured) / len(measured), self.level(index)
        measured.clear()
        after = before + (accuracy >= rule.raise_at) - (accuracy < rule.lower_at)
        after = min(max(after, 0), rule.levels - 1)
        if after == before:
            return
        count = len(manifest.environments)
        self._levels = [after if each == index else self.level(each) for each in range(count)]
        self._events.emit(
            "trainer.level_changed",
            environment=labels(manifest.environments)[index],
            level=after,
            highest=rule.levels - 1,
            accuracy=accuracy,
        )


def _mean(verdict: Verdict, group: int) -> float:
    if verdict.task_means:
        return verdict.task_means[group]
    return sum(verdict.rewards[group]) / len(verdict.rewards[group])


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
