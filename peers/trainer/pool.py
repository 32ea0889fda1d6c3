"""Accepted submissions that wait to be trained on: the online filter labels their groups, and the
pool keeps them in the order in which they are consumed.

Imports no torch, since the network process uses it while it collects. The learner trains on the
groups labelled `kept`, except those in which every advantage is 0."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

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

SPREAD_MIN = 1e-9
"""Rewards closer than this are equal."""

UNCOUNTED: frozenset[GroupLabel] = frozenset({"quarantined", "continuation"})
"""Labels of groups that other groups must replace in a batch."""


def label_groups(
    verdict: Verdict, environments: Sequence[EnvironmentReference], *, learns: bool = True
) -> list[GroupLabel]:
    """Label each group of an accepted submission by its own environment's bounds.

    Where the run does not learn, every group that has grades is kept.

    Spread and accuracy refer to the task's reward. A group whose rewards differ only by length
    penalties is kept only where that environment's `spread` is "total"."""
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


class SubmissionKey(NamedTuple):
    """What determines a submission's groups: two files under one key hold the same groups."""

    lineage: int
    policy: int
    step: int
    number: int
    """Consecutive from 0 within the step, per worker."""
    worker: str

    @classmethod
    def of(cls, verdict: Verdict) -> Self:
        return cls(verdict.lineage, verdict.policy, verdict.step, verdict.number, verdict.worker)


@dataclass(frozen=True)
class Accepted:
    """An accepted submission whose file is on this disk."""

    digest: bytes
    verdict: Verdict
    path: str
    labels: list[GroupLabel] = field(default_factory=list)
    """The online filter's label of each group."""
    fill: Literal["drop", "refill"] = "drop"
    """The filter's `fill` setting."""

    @property
    def counted(self) -> int:
        """Groups that count towards a batch."""
        if self.fill == "refill":
            return self.labels.count("kept")
        return len(self.labels) - sum(label in UNCOUNTED for label in self.labels)

    @property
    def turn(self) -> tuple[int, int, str]:
        """Sort key of the order of consumption: step, then number, then worker."""
        return (self.verdict.step, self.verdict.number, self.verdict.worker)


class Pool:
    """Accepted submissions by digest, and the number of groups that they count for."""

    def __init__(self) -> None:
        self._entries: dict[bytes, Accepted] = {}
        self.groups = 0
        """Groups that count towards a batch."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, accepted: Accepted) -> None:
        """Add a submission; it replaces one with the same digest."""
        self.remove(accepted.digest)
        self._entries[accepted.digest] = accepted
        self.groups += accepted.counted

    def remove(self, digest: bytes) -> None:
        """Remove a submission, if the pool holds it."""
        accepted = self._entries.pop(digest, None)
        if accepted is not None:
            self.groups -= accepted.counted

    def take(self, groups: int) -> list[Accepted]:
        """Remove and return the oldest submissions that count for `groups` groups, or all."""
        taken = self.first(groups)
        for accepted in taken:
            self.remove(accepted.digest)
        return taken

    def first(self, groups: int) -> list[Accepted]:
        """The submissions that `take` would return now."""
        found: list[Accepted] = []
        for accepted in self.oldest_first():
            if groups <= 0:
                break
            found.append(accepted)
            groups -= accepted.counted
        return found

    def oldest_first(self) -> list[Accepted]:
        """All submissions in the order of consumption."""
        return sorted(self._entries.values(), key=lambda accepted: accepted.turn)

    def matching(self, matches: Callable[[Verdict], bool]) -> list[Accepted]:
        """Submissions whose verdict matches."""
        return [each for each in self._entries.values() if matches(each.verdict)]
