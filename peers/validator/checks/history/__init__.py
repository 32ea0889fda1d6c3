"""The checks across submissions: copies and implausible speed. None of them proves a fault."""

from peers.validator.checks.base import Check
from peers.validator.checks.history.duplicates import NoDuplicates
from peers.validator.checks.history.evidence import History
from peers.validator.checks.history.speed import Speed

CHECKS: tuple[Check[History], ...] = (NoDuplicates(), Speed())

__all__ = ["CHECKS", "History"]
