"""What thresholds make of a worker's submissions, without a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from peers.calibration.work import HandedIn, Sample, find
from peers.engines.engine import Engine
from peers.validator.evidence.submission import Recomputed, bans, evidence_of
from peers.validator.recompute import Found
from swarm.ledger.evidence import WorkerEvidence
from swarm.wire.manifest import Sampling, Thresholds
from swarm.wire.messages import Evidence
from tests.attacks.cheats import GradedWorkload, Work, Worker

_T = TypeVar("_T")

POOLED = ("sampler", "policy", "selection")
"""Processes whose e-value refuses a submission; a text's outliers are refused one by one."""


@dataclass(frozen=True)
class Judged(Sample):
    """One submission, recomputed, with the outcomes of its rollouts."""

    recomputed: Recomputed

    @property
    def completions(self) -> int:
        return len(self.lengths)

    @property
    def reward(self) -> float:
        """Mean reward."""
        rewards = [reward for group in self.recomputed.outcomes[0] for reward in group]
        return sum(rewards) / len(rewards)


def judge(
    worker: Worker,
    validator: Engine,
    workload: GradedWorkload,
    number: int,
    name: str = "calibration",
) -> Judged:
    """Let `worker` do the work of submission `number`, and recompute it."""
    work, sampling = workload.work(number, name), workload.sampling
    handed_in = worker.submit(work, sampling)
    return judged_of(find(validator, work, sampling, handed_in), work, sampling, handed_in)


def judged_of(found: Found, work: Work, sampling: Sampling, handed_in: HandedIn) -> Judged:
    """What was found of a submission, with the outcomes of its rollouts."""
    recomputed = Recomputed(
        margins=found.margins,
        errors=found.errors,
        ties=_grouped(list[Sequence[bool]](found.ties), sampling.group_size),
        outcomes=_outcomes(work, handed_in.completions, sampling),
    )
    return Judged(found, [len(each) for each in handed_in.completions], recomputed)


def _outcomes(
    work: Work, completions: list[list[int]], sampling: Sampling
) -> list[list[list[float]]]:
    """Reward, whether the rollout stopped, and its length: [3][groups][group size]."""
    size = sampling.group_size
    rewards = [work.rewards(row, tokens) for row, tokens in enumerate(completions)]
    stopped = [float(tokens[-1] in sampling.stop_ids) for tokens in completions]
    lengths = [float(len(tokens)) for tokens in completions]
    return [_grouped(each, size) for each in (rewards, stopped, lengths)]


def _grouped(rows: list[_T], size: int) -> list[list[_T]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@dataclass(frozen=True)
class Assessment:
    """What thresholds make of one worker's submissions, in order."""

    submissions: int
    completions: int
    tokens: int
    chunks: int
    refused: int
    refused_by: dict[str, int]
    tokens_until_eviction: int | None
    """None: not evicted."""
    process: str
    """The process with the largest capital at the eviction, or at the end."""
    bans: list[float]
    """[submissions] Largest log10 of an e-value of the pooled processes."""
    log_capital: float
    mean_margin: float
    mean_error: float
    exponents_min: int
    margin_max: float
    mismatch_share: float
    reward: float


def failures(sample: Judged, evidence: Evidence, thresholds: Thresholds) -> list[str]:
    """The statistical checks that refuse a submission."""
    limits = thresholds
    proofs = sum(
        chunk.exponent_matches >= limits.proof_exponents_min
        and chunk.mantissa_mean <= limits.proof_mantissa_mean_max
        and chunk.mantissa_median <= limits.proof_mantissa_median_max
        and chunk.sign_mismatches <= 3
        for chunk in sample.found.chunks
    )
    failed = []
    if proofs < limits.proof_chunks_share_min * len(sample.found.chunks):
        failed.append("proofs")
    if sample.found.margins.max() > limits.margin_max:
        failed.append("sampling_bound")
    odds = -math.log10(limits.refusal_p_value)
    failed += [name for name in POOLED if bans(getattr(evidence, name)) > odds]
    return failed


def assess(samples: Sequence[Judged], thresholds: Thresholds) -> Assessment:
    """Judge a worker's submissions in order, as one validator that recomputes all of them does."""
    worker = WorkerEvidence()
    refused_by: dict[str, int] = {}
    refused = tokens = 0
    evicted: int | None = None
    odds: list[float] = []
    for each in samples:
        evidence = evidence_of(each.recomputed, thresholds)
        failed = failures(each, evidence, thresholds)
        refused += bool(failed)
        for name in failed:
            refused_by[name] = refused_by.get(name, 0) + 1
        odds.append(max(bans(getattr(evidence, name)) for name in POOLED))
        tokens += each.tokens
        if evicted is None:
            worker.add("validator", evidence)
            if worker.standing().p_value <= thresholds.eviction_p_value:
                evicted = tokens
    standing = worker.standing()
    margins = np.concatenate([each.found.margins for each in samples])
    return Assessment(
        submissions=len(samples),
        completions=sum(each.completions for each in samples),
        tokens=tokens,
        chunks=sum(len(each.found.chunks) for each in samples),
        refused=refused,
        refused_by=refused_by,
        tokens_until_eviction=evicted,
        process=standing.process,
        bans=odds,
        log_capital=standing.log_capital,
        mean_margin=float(np.minimum(margins, 1.0).mean()),
        mean_error=float(np.concatenate([each.found.errors for each in samples]).mean()),
        exponents_min=min(c.exponent_matches for each in samples for c in each.found.chunks),
        margin_max=float(margins.max()),
        mismatch_share=float((margins > 0).mean()),
        reward=float(np.mean([each.reward for each in samples])),
    )


def area(honest: list[float], attack: list[float]) -> float:
    """Area under the ROC curve: the probability that a cheat's submission scores higher."""
    wins = [(a > h) + (a == h) / 2 for a in attack for h in honest]
    return float(np.mean(wins))
