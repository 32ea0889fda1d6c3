"""The evidence of the checks across submissions. Looking at it adds the submission to the record,
so that one which fails a check leaves no trace in those after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from peers.validator.statistics import Duplicates, Pace


@dataclass
class History:
    """A submission, and what its worker and others have handed in before."""

    worker: str
    group_digests: Sequence[bytes]
    tokens: int
    duplicates: Duplicates
    pace: Pace
    now: float

    @cached_property
    def groups_copied(self) -> int:
        """Groups that another submission had before."""
        return self.duplicates.seen(self.group_digests, self.worker)

    @cached_property
    def tokens_per_second(self) -> float:
        """Since the worker's first submission."""
        return self.pace.observe(self.tokens, self.now)
