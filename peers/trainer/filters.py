"""The online filter: which accepted groups are worth training on, and how many more to ask for.

Imports no torch, since the network process uses it while it collects. The learner trains on the
groups labelled `kept`, except those in which every advantage is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from swarm.wire.manifest import EnvironmentReference
from swarm.wire.messages import Verdict

GroupLabel = Literal[
    "kept",
    "quarantined",
    "continuation",
    "no_spread",
    "length_only",
    "too_hard",
    "too_easy",
    "too_old",
]
"""What the filter says of a group: worth training on; not graded by its validator; made for the
value of a state; all rewards equal; rewards that differ only by length penalties; mean task reward
below or above the bounds; older than its environment allows."""

SMOOTHING = 0.1
"""Weight of the newest submission in the running share of groups kept."""

KEEP_RATE_MIN = 1 / 16
"""Floor of that share: a smaller share would request over sixteen times the work at once."""

SPREAD_MIN = 1e-9
"""Rewards closer than this are equal."""


def label_groups(
    verdict: Verdict, environments: Sequence[EnvironmentReference], *, learns: bool = True
) -> list[GroupLabel]:
    """Label each group of an accepted submission by its own environment's bounds.

    Where the run does not learn, every group that has grades is kept.

    Spread and accuracy refer to the task's reward. A group whose rewards differ only by length
    penalties is kept only where that environment's `spread` is "total".
    """
    found: list[GroupLabel] = []
    for index, rewards in enumerate(verdict.rewards):
        filters = environments[environment_of(verdict, index)]
        total = max(rewards) - min(rewards)
        if verdict.task_means:
            mean, spread = verdict.task_means[index], verdict.task_spreads[index]
        else:
            mean, spread = sum(rewards) / len(rewards), total
        if index in verdict.quarantined:
            found.append("quarantined")
        elif verdict.continues(index):
            found.append("continuation")
        elif not learns:
            found.append("kept")
        elif total <= SPREAD_MIN:
            found.append("no_spread")
        elif spread <= SPREAD_MIN and filters.spread == "task":
            found.append("length_only")
        elif mean < filters.accuracy_min:
            found.append("too_hard")
        elif mean > filters.accuracy_max:
            found.append("too_easy")
        else:
            found.append("kept")
    return found


def label_old(
    labels: Sequence[GroupLabel],
    verdict: Verdict,
    environments: Sequence[EnvironmentReference],
    step: int,
) -> list[GroupLabel]:
    """The labels at training step `step`, at which groups may be older than allowed."""
    found: list[GroupLabel] = []
    for index, label in enumerate(labels):
        allowed = environments[environment_of(verdict, index)].max_staleness
        old = label == "kept" and 0 <= allowed < step - verdict.policy
        found.append("too_old" if old else label)
    return found


def environment_of(verdict: Verdict, group: int) -> int:
    """Index of a group's environment in the run's list."""
    return verdict.environments[group] if verdict.environments else 0


class KeepRate:
    """A running share of the groups that the filter keeps."""

    def __init__(self) -> None:
        self._average = 0.0
        self._weight = 0.0

    def observe(self, labels: list[GroupLabel]) -> None:
        """Add a submission's groups to the share; continuations do not count."""
        count = len(labels) - labels.count("continuation")
        if not count:
            return
        share = labels.count("kept") / count
        self._average += SMOOTHING * (share - self._average)
        self._weight += SMOOTHING * (1 - self._weight)

    @property
    def value(self) -> float:
        """The share, in [1/16, 1]; 1 before the first submission."""
        if not self._weight:
            return 1.0
        return max(KEEP_RATE_MIN, self._average / self._weight)


def groups_to_ask_for(missing: int, keep_rate: float, coming: int) -> int:
    """Number of groups that a step order asks for.

    This is `missing`, the kept groups still needed, divided by `keep_rate`, less `coming`, the
    groups announced and not yet judged.
    """
    return max(0, math.ceil(missing / keep_rate - 1e-9) - coming)
