"""The interface of a check, and the functions that run checks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from swarm.jobs.validation import Report
from swarm.wire import messages

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


@dataclass(frozen=True)
class Check(Generic[Given]):
    """One stateless test of a submission, based on evidence of one kind."""

    name: str
    """The check's name in verdicts and in `docs/protocol.md`."""
    examine: Callable[[Given], Finding]
    proven: bool = False
    """Whether anyone can recompute a fault from signed bytes: it then evicts the worker."""
    quarantines: bool = False
    """Whether a failure is no fault of the worker, and only keeps it from training."""


def check(
    name: str, *, proven: bool = False, quarantines: bool = False
) -> Callable[[Callable[[Given], Finding]], Check[Given]]:
    """Make a check of a function."""
    return lambda examine: Check(name, examine, proven, quarantines)


def run(checks: Iterable[Check[Given]], evidence: Given, report: Report) -> Report:
    """Run checks up to the first failure and add their results to `report`; returns it."""
    for check in checks:
        if report.failed:
            break
        _add(report, check, check.examine(evidence))
    return report


def run_all(checks: Iterable[Check[Given]], evidence: Given, *, observes: bool = False) -> Report:
    """Run and report every check; if the run `observes`, a failed one decides nothing."""
    report = Report()
    for check in checks:
        _add(report, check, check.examine(evidence))
    if observes and report.failed:
        return Report(checks=report.checks, detail=f"only observed: {report.detail}")
    return report


def first_failure(checks: Iterable[Check[Given]], evidence: Given) -> Report | None:
    """A report that holds only the first failed check; None if all pass."""
    for check in checks:
        finding = check.examine(evidence)
        if not finding.passed:
            return _add(Report(), check, finding)
    return None


def _add(report: Report, check: Check[Any], finding: Finding) -> Report:
    name = finding.check or check.name
    report.checks.append(
        messages.Check(
            name=name, figure=finding.figure, threshold=finding.threshold, passed=finding.passed
        )
    )
    if not finding.passed and not report.failed:
        report.failed, report.detail = name, finding.detail
        report.proven_fault = check.proven if finding.proven is None else finding.proven
        report.quarantined = check.quarantines
    return report
