"""The header agrees with the signed announcement, the step order and the manifest."""

from __future__ import annotations

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.checks.file.evidence import Inspection


class HeaderFields(Check[Inspection]):
    """Figure: header fields that differ."""

    name = "header"
    proven = True

    def examine(self, evidence: Inspection) -> Finding:
        header, expected = evidence.contents.header, evidence.header
        wrong = [name for name, value in expected.items() if getattr(header, name) != value]
        detail = ""
        if wrong:
            said = getattr(header, wrong[0])
            detail = f"the header gives {wrong[0]} as {said!r}, not {expected[wrong[0]]!r}"[:300]
        return at_most(len(wrong), 0, detail)
