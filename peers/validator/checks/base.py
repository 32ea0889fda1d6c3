"""The interface of a check, and the report of those that were run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from swarm import messages

Evidence = TypeVar("Evidence", contravariant=True)
Given = TypeVar("Given")


@dataclass(frozen=True)
class Finding:
    """The result of one check of one submission."""

    figure: float
    threshold: float
    passed: bool
    detail: str = ""
    """One sentence for the verdict if the check failed."""
    check: str = ""
    """The name of another check whose fault was found on the way; empty: this check's own."""
    proven: bool | None = None
    """Instead of `Check.proven`, where faults of one check differ in this."""


def at_most(figure: float, threshold: float, detail: str = "") -> Finding:
    """A finding that passes unless the figure exceeds the threshold."""
    return Finding(figure, threshold, figure <= threshold, detail)


class Check(ABC, Generic[Evidence]):
    """One question about a submission, answered from `Evidence`. Stateless."""

    name: ClassVar[str]
    """In verdicts, and in `docs/protocol.md`."""
    proven: ClassVar[bool] = False
    """Whether anyone can recompute a fault exactly from signed bytes. Its worker is evicted."""
    quarantines: ClassVar[bool] = False
    """Whether a failure only withholds the submission from training: no fault of its worker."""

    @abstractmethod
    def examine(self, evidence: Evidence) -> Finding:
        """Answer the question."""


@dataclass
class Report:
    """The results of checks, and the first that failed."""

    checks: list[messages.Check] = field(default_factory=list)
    failed: str = ""
    """Name of the check that failed; empty if none has."""
    detail: str = ""
    proven_fault: bool = False
    quarantined: bool = False

    def run(self, checks: Iterable[Check[Given]], evidence: Given) -> Report:
        """Add the results of checks up to the first that fails; returns itself."""
        for check in checks:
            if self.failed:
                break
            self.add(check, check.examine(evidence))
        return self

    def run_all(self, checks: Iterable[Check[Given]], evidence: Given) -> Report:
        """Add the results of every check, since all their figures are known; returns itself."""
        for check in checks:
            self.add(check, check.examine(evidence))
        return self

    def add(self, check: Check[Any], finding: Finding) -> None:
        """Add the result of one check."""
        name = finding.check or check.name
        self.checks.append(
            messages.Check(
                name=name,
                figure=finding.figure,
                threshold=finding.threshold,
                passed=finding.passed,
            )
        )
        if not finding.passed and not self.failed:
            self.failed, self.detail = name, finding.detail
            self.proven_fault = check.proven if finding.proven is None else finding.proven
            self.quarantined = check.quarantines


def first_failure(checks: Iterable[Check[Given]], evidence: Given) -> Report | None:
    """A report of the first check that fails, alone; None if all pass."""
    for check in checks:
        finding = check.examine(evidence)
        if not finding.passed:
            report = Report()
            report.add(check, finding)
            return report
    return None
