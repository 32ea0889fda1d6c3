"""The evidence of the checks across submissions.

Each figure is computed on first use, which also adds the submission to that record. A submission
that fails a check is therefore not added to the records of later checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from peers.validator.statistics import Duplicates, Pace


@dataclass
class History:
    """A submission, and the records of earlier submissions by its worker and by others."""

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
