"""The checks across submissions: copies and implausible speed. None of them proves a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.statistics import Duplicates, Pace


@dataclass
class History:
    """A submission, and the records of earlier submissions by its worker and by others.

    Each figure is computed on first use, which also adds the submission to that record. A
    submission that fails a check is therefore not added to the records of later checks.
    """

    worker: str
    group_digests: Sequence[bytes]
    tokens: int
    duplicates: Duplicates
    pace: Pace
    now: float

    @cached_property
    def groups_copied(self) -> int:
        """Groups that an earlier submission contains."""
        return self.duplicates.seen(self.group_digests, self.worker)

    @cached_property
    def tokens_per_second(self) -> float:
        """The worker's completion tokens per second since its first submission."""
        return self.pace.observe(self.tokens, self.now)


class NoDuplicates(Check[History]):
    """The groups are not copies of another submission's groups.

    Figure: the number of copied groups if more than half are copies, else 0.
    """

    name = "duplicates"

    def examine(self, evidence: History) -> Finding:
        copied = evidence.groups_copied
        return at_most(copied, 0, f"{copied} groups are copies of another submission's")


WORKER_TOKENS_PER_SECOND_MAX = 1e6
"""No single peer generates faster. A worker that submits more pools the work of several machines
or fabricates it."""


class Speed(Check[History]):
    """The worker does not generate faster than a single machine can.

    Figure: completion tokens per second.

    Other machines may have helped, so a failure only withholds the submission.
    """

    name = "speed"
    quarantines = True

    def examine(self, evidence: History) -> Finding:
        return at_most(
            evidence.tokens_per_second,
            WORKER_TOKENS_PER_SECOND_MAX,
            "more tokens a second than any one machine generates",
        )


CHECKS: tuple[Check[History], ...] = (NoDuplicates(), Speed())
