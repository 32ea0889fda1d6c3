"""The groups are not copies of another submission's groups."""

from __future__ import annotations

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.checks.history.evidence import History


class NoDuplicates(Check[History]):
    """Figure: the number of copied groups if more than half are copies, else 0."""

    name = "duplicates"

    def examine(self, evidence: History) -> Finding:
        copied = evidence.groups_copied
        return at_most(copied, 0, f"{copied} groups are copies of another submission's")
