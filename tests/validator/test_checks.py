"""How checks are run, and what their report says."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from peers.validator.checks import announcement, file, history, policy, standing
from peers.validator.checks.base import Check, Finding, at_most, check, first_failure, run, run_all
from swarm.jobs.validation import Report
from swarm.wire import messages


def below(
    name: str, threshold: int, *, proven: bool = False, quarantines: bool = False
) -> Check[int]:
    @check(name, proven=proven, quarantines=quarantines)
    def examine(evidence: int) -> Finding:
        return at_most(evidence, threshold, f"{evidence} is more than {threshold}")

    return examine


LOOSE, TIGHT, TIGHTER = below("loose", 9), below("tight", 4, proven=True), below("tighter", 3)


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
    report = run([LOOSE, below("speed", 2, quarantines=True)], 5, Report())
    assert (report.failed, report.quarantined, report.proven_fault) == ("speed", True, False)


def test_a_check_may_find_the_fault_of_another() -> None:
    @check("schema", proven=True)
    def reads(evidence: int) -> Finding:
        return Finding(1, 0, passed=False, detail="torn", check="header", proven=False)

    report = run([reads, LOOSE], 5, Report())
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


CHECKS = {
    module: [each for each in vars(module).values() if isinstance(each, Check)]
    for module in (announcement, standing, file, history, policy)
}


def test_every_check_is_in_the_protocols_table() -> None:
    page = Path("docs/protocol.md").read_text(encoding="utf-8")
    table = page.partition("### Checks")[2].partition("## The ledger")[0]
    for each in chain(*CHECKS.values()):
        assert f"`{each.name}`" in table, f"docs/protocol.md says nothing of {each.name}"


def test_only_what_anyone_can_recompute_is_proven() -> None:
    for module, checks in CHECKS.items():
        assert checks and {each.proven for each in checks} == {module is file}


def test_a_policy_that_no_trainer_announced_is_refused_without_proof() -> None:
    """The announcement may be on its way here, so this proves no fault."""
    found = run([standing.published], (7, 5), Report())
    assert (found.failed, found.proven_fault, found.quarantined) == ("spans", False, False)
    assert found.detail == "it names policy 7, which no trainer has announced"
    assert not run([standing.published], (5, 5), Report()).failed
