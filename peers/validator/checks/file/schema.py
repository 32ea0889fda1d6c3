"""The file is sound Parquet with exactly a submission's columns, within every bound."""

from __future__ import annotations

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.checks.file.evidence import Inspection
from swarm.rollouts.submission_file import BadSubmission


class Schema(Check[Inspection]):
    """Figure: the first fault's, 0 without a fault. It may be a fault of the check `header`."""

    name = "schema"
    proven = True

    def examine(self, evidence: Inspection) -> Finding:
        try:
            evidence.contents  # noqa: B018 - reads the file
        except BadSubmission as fault:
            return Finding(
                fault.figure,
                fault.threshold,
                passed=False,
                detail=fault.detail,
                check=fault.check,
                proven=fault.proven,
            )
        return at_most(0, 0)
