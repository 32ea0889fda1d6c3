"""The file holds all announced groups, complete and in the seed's order."""

from __future__ import annotations

import numpy as np

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.checks.file.evidence import Inspection


class Counts(Check[Inspection]):
    """Figure: the number of rows if that is wrong, else the number of rows out of order."""

    name = "counts"
    proven = True

    def examine(self, evidence: Inspection) -> Finding:
        rollouts, group_size = evidence.rollouts, evidence.group_size
        rows = np.arange(len(evidence.groups) * group_size)
        if len(rollouts) != len(rows):
            detail = f"{len(rollouts)} rows instead of {len(rows)}"
            return Finding(len(rollouts), len(rows), passed=False, detail=detail)
        misplaced = (rollouts.group != rows // group_size) | (rollouts.sample != rows % group_size)
        return at_most(int(misplaced.sum()), 0, "rows are missing, repeated or out of order")
