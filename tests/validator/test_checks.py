"""How checks are run, and what their report says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers.validator.checks import announcement, file, history, policy, standing
from peers.validator.checks.base import Check, Finding, at_most, first_failure, run, run_all
from swarm.jobs.validation import Report
from swarm.wire import messages


class Below(Check[int]):
    def __init__(self, name: str, threshold: int, *, proven: bool = False) -> None:
        self.name, self.proven = name, proven  # type: ignore[misc]
        self._threshold = threshold

    def examine(self, evidence: int) -> Finding:
        return at_most(evidence, self._threshold, f"{evidence} is more than {self._threshold}")


class Withholding(Below):
    quarantines = True


LOOSE, TIGHT, TIGHTER = Below("loose", 9), Below("tight", 4, proven=True), Below("tighter", 3)


def test_checks_run_in_order_up_to_the_first_that_fails() -> None:
    report = run([LOOSE, TIGHT, TIGHTER], 5, Report())
    assert report.checks == [
        messages.Check(name="loose", figure=5, threshold=9, passed=True),
        messages.Check(name="tight", figure=5, threshold=4, passed=False),
    ]
    assert (report.failed, report.detail) == ("tight", "5 is more than 4")
    assert report.proven_fault and not report.quarantined
    assert run([LOOSE], 5, report).checks[2:] == [], "nothing runs after a failure"


def test_all_figures_are_reported_where_they_are_known_and_the_first_fault_counts() -> None:
    report = run_all([LOOSE, TIGHTER, TIGHT], 5)
    assert [check.passed for check in report.checks] == [True, False, False]
    assert (report.failed, report.proven_fault) == ("tighter", False)


def test_a_failure_may_withhold_a_submission_without_blame() -> None:
    report = run([LOOSE, Withholding("speed", 2)], 5, Report())
    assert (report.failed, report.quarantined, report.proven_fault) == ("speed", True, False)


def test_a_check_may_find_the_fault_of_another() -> None:
    class Reads(Below):
        def examine(self, evidence: int) -> Finding:
            return Finding(1, 0, passed=False, detail="torn", check="header", proven=False)

    report = run([Reads("schema", 0, proven=True), LOOSE], 5, Report())
    assert (report.failed, report.checks[-1].name, report.proven_fault) == (
        "header",
        "header",
        False,
    )


def test_checks_that_pass_in_silence_leave_only_the_failure() -> None:
    assert first_failure([LOOSE], 5) is None
    refusal = first_failure([LOOSE, TIGHT, TIGHTER], 5)
    assert refusal is not None
    assert [check.name for check in refusal.checks] == [refusal.failed] == ["tight"]


def test_every_check_is_in_the_protocols_table() -> None:
    lists: list[tuple[Check[Any], ...]] = [
        announcement.CHECKS, standing.WORKER, standing.POLICY, announcement.PENDING,
        file.CHECKS, history.CHECKS, policy.CHECKS,
    ]  # fmt: skip
    page = Path("docs/protocol.md").read_text(encoding="utf-8")
    table = page.partition("### Checks")[2].partition("## The ledger")[0]
    for check in (check for checks in lists for check in checks):
        assert f"`{check.name}`" in table, f"docs/protocol.md says nothing of {check.name}"


def test_only_what_anyone_can_recompute_is_proven() -> None:
    assert all(check.proven for check in file.CHECKS)
    others: tuple[Check[Any], ...] = (
        *announcement.CHECKS,
        *standing.WORKER,
        *history.CHECKS,
        *policy.CHECKS,
    )
    assert not any(check.proven for check in others)


def test_a_policy_that_no_trainer_announced_is_refused_without_proof() -> None:
    """The announcement may be on its way here, so this proves no fault."""
    found = run(standing.SPANS, standing.Named(7, 5), Report())
    assert (found.failed, found.proven_fault, found.quarantined) == ("spans", False, False)
    assert found.detail == "it names policy 7, which no trainer has announced"
    assert not run(standing.SPANS, standing.Named(5, 5), Report()).failed
