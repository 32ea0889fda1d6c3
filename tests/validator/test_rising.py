"""A worker is told how near its evidence is to the limits, and quarantined before it is evicted."""

from __future__ import annotations

import math

from peers.demo.recipes import THRESHOLDS
from peers.validator.checks.base import run as run_checks
from peers.validator.checks.history import Record, rising
from swarm.jobs.validation import Report
from swarm.ledger.evidence import Standing
from swarm.run.heard_verdicts import failed_check, nearest
from swarm.wire.manifest import Thresholds
from swarm.wire.messages import Check
from tests.simnet.test_audits import run


def test_a_worker_whose_evidence_rises_is_quarantined_and_told_before_it_is_evicted() -> None:
    evictions, seen = run(Thresholds(measured_tokens=1, honest_margin=0.005), kind="editor")
    failed = [
        (fields["outcome"], fields["failed"], fields["detail"])
        for name, fields in seen
        if name == "validator.verdict" and fields["failed"]
    ]
    assert evictions == 1
    first = failed[0]
    assert first[:2] == ("quarantined", "evidence")
    assert "10^9 to 1 evicts it" in first[2] and "swarm doctor" in first[2]


def odds(log10: float) -> Report:
    standing = Standing(log10 * math.log(10), "policy")
    return run_checks([rising], Record(standing, THRESHOLDS), Report())


def test_evidence_below_the_limit_is_reported_and_quarantines_nothing() -> None:
    report = odds(5.9)
    assert (report.failed, report.quarantined) == ("", False)
    assert nearest(report.checks) == "evidence 5.9 of 6"
    assert odds(-3.0).checks[0].figure == 0.0
    over = odds(6.1)
    assert (over.failed, over.quarantined, over.proven_fault) == ("evidence", True, False)


def test_the_nearest_limit_is_the_one_with_the_largest_share() -> None:
    def check(name: str, figure: float, threshold: float, *, passed: bool = True) -> Check:
        return Check(name=name, figure=figure, threshold=threshold, passed=passed)

    checks = [
        check("schema", 0, 0),
        check("proofs", 1.0, 1.0),
        check("activations", 4.12, 6.0),
        check("sampling", -0.3, 6.0),
        check("sampling_bound", 0.41, 1.4),
    ]
    assert nearest(checks) == "activations 4.1 of 6"
    assert nearest(checks[:2]) == "", "nothing statistical was recomputed"
    assert nearest([check("sampling", -0.3, 6.0)]) == "sampling 0 of 6"
    observed = check("activations", 12.0, 6.0, passed=False)
    assert failed_check([observed, check("speed", 2.0, 1.0, passed=False)], "speed") is not None
    assert failed_check([observed], "speed") is None, "what was observed has not failed"
