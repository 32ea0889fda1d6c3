"""Accepted submissions that wait to be trained on, in the order in which they are consumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from peers.trainer.filters import GroupLabel
from swarm.wire.messages import Verdict

UNCOUNTED: frozenset[GroupLabel] = frozenset({"quarantined", "continuation"})
"""Labels of groups that other groups must replace in a batch."""


class SubmissionKey(NamedTuple):
    """What determines a submission's groups: two files under one key hold the same groups."""

    lineage: int
    policy: int
    step: int
    number: int
    """Consecutive from 0 within the step, per worker."""
    worker: str

    @staticmethod
    def of(verdict: Verdict) -> SubmissionKey:
        return SubmissionKey(
            verdict.lineage, verdict.policy, verdict.step, verdict.number, verdict.worker
        )


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
        """Remove and return the oldest submissions that together count for `groups` groups, or
        all of them."""
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
