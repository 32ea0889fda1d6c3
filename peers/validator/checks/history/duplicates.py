"""The groups are no copies of another submission's."""

from __future__ import annotations

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.checks.history.evidence import History


class NoDuplicates(Check[History]):
    """Figure: groups copied, if more than half."""

    name = "duplicates"

    def examine(self, evidence: History) -> Finding:
        copied = evidence.groups_copied
        return at_most(copied, 0, f"{copied} groups are copies of another submission's")
