"""A run whose thresholds nobody measured observes: statistics are reported and decide nothing."""

from __future__ import annotations

import msgspec
import pytest
import trio
from msgspec.structs import replace

from peers.demo.recipes import THRESHOLDS
from swarm.jobs.validation import Judge, Judged
from swarm.ledger.evidence import WorkerEvidence
from swarm.wire.manifest import Thresholds
from tests.simnet.test_audits import run
from tests.validator.conftest import Stage

MEASURED, DEFAULTS = THRESHOLDS, Thresholds()


def judged_of_another_seed(stage: Stage, thresholds: Thresholds) -> Judged:
    """The tokens of another submission's noise: text that this seed does not give."""
    header, rollouts = stage.generate(number=7)
    digest = stage.inspect(header, rollouts, number=7).canonical_digest
    job = Judge(
        order=stage.order(number=8),
        path=str(stage.folder / "canonical"),
        digest=digest,
        thresholds=thresholds,
        rewards=[],
    )
    return trio.run(stage.prefill.judge, job)


def test_statistics_are_reported_and_refuse_nothing_until_thresholds_are_measured(
    stage: Stage,
) -> None:
    measured = judged_of_another_seed(stage, MEASURED)
    observed = judged_of_another_seed(stage, DEFAULTS)
    assert measured.failed == "sampling" and not measured.proven_fault
    assert (observed.failed, observed.quarantined) == ("", False)
    assert observed.checks == measured.checks, "the figures are the same"
    assert observed.detail == f"only observed: {measured.detail}"


def test_what_was_observed_is_no_evidence_later(stage: Stage) -> None:
    """Bets against unmeasured bounds would evict honest workers once bounds are measured."""
    record = WorkerEvidence()
    for _ in range(3):
        evidence = judged_of_another_seed(stage, DEFAULTS).evidence
        assert evidence.tokens > 0 and evidence.mismatches > 0
        record.add("validator", evidence)
    assert record.standing().p_value == 1.0
    record.add("validator", judged_of_another_seed(stage, MEASURED).evidence)
    assert record.standing().p_value < 1e-9


@pytest.mark.parametrize("kind", ["wrong-weights", "malformed-files"])
def test_only_exact_faults_evict_in_a_run_that_observes(kind: str) -> None:
    evictions, seen = run(DEFAULTS, kind=kind)
    outcomes = {fields["outcome"] for name, fields in seen if name == "validator.verdict"}
    if kind == "malformed-files":
        assert evictions == 1 and "refused" in outcomes
    else:
        assert evictions == 0 and outcomes == {"accepted"}
        assert run(replace(DEFAULTS, measured_tokens=1), kind=kind)[0] == 1


def test_a_manifest_of_an_older_build_observes() -> None:
    older = list(msgspec.structs.astuple(DEFAULTS))[:-2]
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=Thresholds)
    assert read.observes and not MEASURED.observes
