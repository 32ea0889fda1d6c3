"""A worker's evidence: the bound on false evictions at every look, restarts, several logs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.validator.evidence.submission import gains
from swarm.ledger.capital import PROCESSES
from swarm.ledger.evidence import WorkerEvidence
from swarm.wire.messages import Evidence

MEAN = 0.01


def evidence(scores: npt.NDArray[np.floating[Any]]) -> Evidence:
    """Evidence of one process; the others saw nothing."""
    return Evidence(
        tokens=len(scores),
        mismatches=0,
        sampler=gains(scores, MEAN),
        policy=[0],
        text=[0],
        selection=[0],
    )


def drawn(random: np.random.Generator, rate: float, tokens: int = 100) -> Evidence:
    return evidence((random.random(tokens) < rate) * 1.0)


def test_honest_workers_are_evicted_no_more_often_than_stated_at_any_look() -> None:
    """At the bound itself, with scores of 0 or 1, 60 looks and a large α, to see the bound."""
    evicted, workers, alpha = 0, 400, 0.05
    for seed in range(workers):
        random, worker = np.random.default_rng(seed), WorkerEvidence()
        for _ in range(60):
            worker.add("alice", drawn(random, MEAN))
            if worker.standing().p_value <= alpha:
                evicted += 1
                break
    assert evicted / workers <= alpha


@pytest.mark.parametrize("honest", [0, 10, 1000])
def test_an_honest_record_hides_nothing(honest: int) -> None:
    """A cheat needs to fake little more after a long honest record than at once."""
    random, worker = np.random.default_rng(0), WorkerEvidence()
    for _ in range(honest):
        worker.add("alice", evidence(np.zeros(100)))
    submissions = 0
    while worker.standing().p_value > 1e-9:
        worker.add("alice", drawn(random, 5 * MEAN))
        submissions += 1
    assert submissions <= 18 + 2 * math.log(honest + 1)


@given(
    st.lists(st.tuples(st.sampled_from(["alice", "bob"]), st.integers(-3000, 3000)), max_size=20)
)
def test_the_standing_does_not_depend_on_how_logs_interleave(given_: list[tuple[str, int]]) -> None:
    def record(verdicts: list[tuple[str, int]]) -> float:
        worker = WorkerEvidence()
        for log, gain in verdicts:
            bets = [gain, -gain]
            worker.add(
                log,
                Evidence(
                    tokens=1, mismatches=0, sampler=bets, policy=bets, text=bets, selection=bets
                ),
            )
        return worker.standing().log_capital

    by_log = sorted(given_, key=lambda verdict: verdict[0])  # stable: each log keeps its order
    assert record(given_) == pytest.approx(record(by_log), abs=1e-9)


def test_several_validators_pool_what_they_saw() -> None:
    alone, shared = WorkerEvidence(), WorkerEvidence()
    random = np.random.default_rng(0)
    for number in range(12):
        seen = drawn(random, 6 * MEAN)
        if number % 3 == 0:
            alone.add("alice", seen)
        shared.add(f"validator {number % 3}", seen)
    assert shared.standing().log_capital > 2 * alone.standing().log_capital


def test_the_process_that_saw_most_is_named() -> None:
    worker = WorkerEvidence()
    assert worker.standing().log_capital == 0.0
    for name in PROCESSES:
        bets = {each: [9000 if each == name else 0] for each in PROCESSES}
        worker = WorkerEvidence()
        worker.add("alice", Evidence(tokens=1, mismatches=0, **bets))
        assert worker.standing().process == name
        assert worker.standing().p_value == pytest.approx(4 / (3 + (math.exp(9) + 1) / 2), rel=1e-9)


@pytest.mark.parametrize("bets", [[], [0], [10**12] * 32, [-(10**12)] * 32])
def test_a_log_with_other_bets_neither_ends_the_reader_nor_hides_evidence(bets: list[int]) -> None:
    """A validator of another version, or a malicious one, may log any number of bets."""
    worker = WorkerEvidence()
    foreign = Evidence(tokens=1, sampler=bets, policy=bets, text=bets, selection=bets)
    worker.add("mallory", foreign)
    for _ in range(20):
        worker.add("alice", evidence(np.ones(10)))
    assert worker.standing().p_value < 1e-9
