"""Curricula: an environment's level follows the accuracy that the trainer measures.

Imports no torch. The trainer writes the levels into each step's order; everyone else reads them
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from peers.environments.collection import labels
from peers.trainer.filters import environment_of
from peers.trainer.pool import UNCOUNTED, Accepted
from peers.trainer.progress import STEPS_REMEMBERED
from swarm.events import Events
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import StepOrder, Verdict


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
