"""What a submission shows beside earlier ones: copied groups and implausible speed.

Neither proves a fault. Two honest groups of an easy task may be the same, and a copy under another
seed fails the recomputation. So either is only a reason to recompute this submission.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.statistics import Duplicates, Pace, PolicyKey


@dataclass
class History:
    """A submission, and the records of earlier submissions by its worker and by others.

    Each figure is computed on first use, which also adds the submission to that record.
    """

    worker: str
    policy: PolicyKey
    group_digests: Sequence[bytes]
    tokens: int
    duplicates: Duplicates
    pace: Pace
    now: float

    @cached_property
    def groups_copied(self) -> int:
        """Groups that a submission of this policy, or one not much older, contains, if they are
        more than half."""
        return self.duplicates.seen(self.group_digests, self.worker, self.policy)

    @cached_property
    def tokens_per_second(self) -> float:
        """The worker's completion tokens per second since its first submission."""
        return self.pace.observe(self.tokens, self.now)

    @property
    def is_striking(self) -> bool:
        """Whether the submission has to be recomputed, whatever its worker's record is."""
        copied = self.groups_copied  # both figures belong into the records
        return self.tokens_per_second > WORKER_TOKENS_PER_SECOND_MAX or copied > 0


WORKER_TOKENS_PER_SECOND_MAX = 1e6
"""No single peer generates faster. A worker that submits more pools the work of several machines
or fabricates it."""


class Speed(Check[History]):
    """The worker does not generate faster than a single machine can.

    Figure: completion tokens per second.

    Other machines may have helped, so a failure only withholds the submission, without credit. It
    is recomputed first: no unchecked text is quarantined.
    """

    name = "speed"
    quarantines = True

    def examine(self, evidence: History) -> Finding:
        return at_most(
            evidence.tokens_per_second,
            WORKER_TOKENS_PER_SECOND_MAX,
            "more tokens a second than any one machine generates",
        )


CHECKS: tuple[Check[History], ...] = (Speed(),)
