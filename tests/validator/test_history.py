"""Copies and implausible speed are reasons to recompute a submission, never to refuse it."""

from __future__ import annotations

import pytest
from blake3 import blake3

from peers.validator.cases import Outcome, verdict_on
from peers.validator.checks.base import run
from peers.validator.checks.history import CHECKS, History
from peers.validator.statistics import Duplicates, Pace
from tests.validator.test_queue import case

GROUPS = [blake3(b"group %d" % number).digest() for number in range(4)]


def history(worker: str, duplicates: Duplicates, pace: Pace, tokens: int = 10) -> History:
    return History(worker, (0, 3), GROUPS, tokens, duplicates, pace, now=100.0)


def test_a_copy_is_recomputed_and_not_refused() -> None:
    duplicates = Duplicates()
    assert not history("alice", duplicates, Pace()).is_striking
    copied = history("mallory", duplicates, Pace())
    assert copied.is_striking
    assert not run(CHECKS, copied, Outcome()).failed


@pytest.mark.parametrize(("tokens", "outcome"), [(10, "accepted"), (2_000_000, "quarantined")])
def test_implausible_speed_is_recomputed_and_earns_no_credit(tokens: int, outcome: str) -> None:
    pace = Pace()
    pace.observe(1, 99.0)
    found = history("mallory", Duplicates(), pace, tokens)
    assert found.is_striking == (outcome == "quarantined")
    judged = Outcome(rewards=[[1.0, 0.0]], environments=[0])
    run(CHECKS, found, judged)
    verdict = verdict_on("mallory" * 8, case(0).submission, judged, 0)
    assert verdict.outcome == outcome
    assert bool(verdict.rewards) == (outcome == "accepted")
