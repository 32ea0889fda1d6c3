"""The interface of a check, and the report of the checks that were run."""

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
    """Name of the check to report, if this check found another check's fault; empty otherwise."""
    proven: bool | None = None
    """Overrides `Check.proven`, for a check with both proven and unproven faults."""


def at_most(figure: float, threshold: float, detail: str = "") -> Finding:
    """A finding that passes unless the figure exceeds the threshold."""
    return Finding(figure, threshold, figure <= threshold, detail)


class Check(ABC, Generic[Evidence]):
    """One stateless test of a submission, based on `Evidence`."""

    name: ClassVar[str]
    """The check's name in verdicts and in `docs/protocol.md`."""
    proven: ClassVar[bool] = False
    """Whether anyone can recompute a fault exactly from signed bytes. If so, a fault evicts the
    worker."""
    quarantines: ClassVar[bool] = False
    """Whether a failure is not the worker's fault and only withholds the submission from
    training."""

    @abstractmethod
    def examine(self, evidence: Evidence) -> Finding:
        """Run the check."""


@dataclass
class Report:
    """The results of checks, and the first failure."""

    checks: list[messages.Check] = field(default_factory=list)
    failed: str = ""
    """Name of the first failed check; empty if none failed."""
    detail: str = ""
    proven_fault: bool = False
    quarantined: bool = False

    def run(self, checks: Iterable[Check[Given]], evidence: Given) -> Report:
        """Run checks up to the first failure and add their results; returns itself."""
        for check in checks:
            if self.failed:
                break
            self.add(check, check.examine(evidence))
        return self

    def run_all(self, checks: Iterable[Check[Given]], evidence: Given) -> Report:
        """Run every check and add its result, because all figures are known; returns itself."""
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
    """A report that holds only the first failed check; None if all pass."""
    for check in checks:
        finding = check.examine(evidence)
        if not finding.passed:
            report = Report()
            report.add(check, finding)
            return report
    return None
