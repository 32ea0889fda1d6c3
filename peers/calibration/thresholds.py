"""Thresholds from honest samples, and what they make of a worker.

Every honest mean gets a factor of safety: the samples come from the machines at hand, and other
hardware rounds differently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from peers.calibration.measure import Sample
from peers.proofs.format import chunk_count
from peers.validator.evidence.submission import bans, evidence_of
from swarm.ledger.evidence import WorkerEvidence
from swarm.wire.manifest import Thresholds
from swarm.wire.messages import Evidence

SAFETY = 2.0
"""Factor on honest margins, mean and largest."""

ERROR_SAFETY = 1.3
"""Factor on the honest mean error of proofs, which varies less between machines."""

LEAST = Thresholds()
"""Least bounds on margins where engines round at all: the demo's, from two million tokens. A few
thousand tokens of a policy that is mostly certain have too few mismatches to say less."""

LEAST_EXACT = Thresholds(honest_margin=2e-5, margin_max=0.05)
"""The same where no token was a mismatch, as in fp32: until a tie of one in a million comes."""

HONEST_ERROR_MIN = 0.002
"""Least bound on the mean error of proofs: a quarter of the last bit of each bf16 value."""

RUN_TOKENS = 1e9
"""Tokens among which no honest margin should exceed the bound on a single one."""

TAIL_MIN = 10
"""Largest mismatches that are extrapolated at least, if there are so many."""

DEVIATIONS = 8
"""Standard deviations kept between honest chunks and the limits on a single proof."""

POOLED = ("sampler", "policy", "selection")
"""Processes whose e-value refuses a submission; a text's outliers are refused one by one."""


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


def propose(honest: Sequence[Sequence[Sample]], base: Thresholds | None = None) -> Thresholds:
    """Thresholds that no honest work comes near; `honest` has one list per pair of engines.

    A few thousand tokens per pair are enough for means, whose errors are counted between rollouts,
    since the tokens of one are alike. They say less about the largest margin that a run will see,
    so that is extrapolated.
    """
    chunks = [chunk for pair in honest for each in pair for chunk in each.found.chunks]
    exponents = [chunk.exponent_matches for chunk in chunks]
    means = [chunk.mantissa_mean for chunk in chunks]
    margin = max(
        _margin_bound([part for each in pair for part in _margins(each)]) for pair in honest
    )
    error = max(_bound([part for each in pair for part in _errors(each)]) for pair in honest)
    largest = max(_largest(np.concatenate([each.found.margins for each in p])) for p in honest)
    tokens = sum(each.tokens for pair in honest for each in pair)
    least = LEAST if largest else LEAST_EXACT
    lowest = min(min(exponents), float(np.mean(exponents) - DEVIATIONS * np.std(exponents)))
    return replace(
        base or Thresholds(),
        proof_exponents_min=max(0, math.floor(lowest) - 2),
        proof_mantissa_mean_max=_digits(
            max(max(means), float(np.mean(means) + DEVIATIONS * np.std(means))) * ERROR_SAFETY + 1
        ),
        proof_mantissa_median_max=max(chunk.mantissa_median for chunk in chunks) + 2,
        honest_margin=_digits(max(least.honest_margin, SAFETY * margin)),
        margin_max=_digits(max(least.margin_max, SAFETY * largest)),
        honest_proof_error=_digits(max(HONEST_ERROR_MIN, ERROR_SAFETY * error)),
        honest_outliers=_digits(max(1e-6, 3 / tokens)),
        measured_tokens=tokens,
    )


Scores = np.ndarray[tuple[int], np.dtype[np.float64]]


def _margins(sample: Sample) -> list[Scores]:
    """The margins of each rollout, as they are pooled."""
    ends = np.cumsum(_lengths(sample))[:-1]
    return np.split(np.minimum(sample.found.margins, 1.0), ends)


def _errors(sample: Sample) -> list[Scores]:
    """The errors of each rollout's proofs."""
    ends = np.cumsum([chunk_count(length) for length in _lengths(sample)])[:-1]
    return np.split(sample.found.errors, ends)


def _lengths(sample: Sample) -> list[int]:
    return [int(length) for group in sample.recomputed.outcomes[2] for length in group]


def _bound(parts: Sequence[Scores]) -> float:
    """Mean of all scores plus three standard errors, counted between rollouts."""
    sums = np.array([part.sum() for part in parts])
    counts = np.array([len(part) for part in parts])
    mean = sums.sum() / counts.sum()
    error = np.sqrt(np.square(sums - mean * counts).sum()) / counts.sum()
    return float(mean + 3 * error)


def _margin_bound(parts: Sequence[Scores]) -> float:
    """The same of margins, or as if three more had been as large as the largest, if that is more.

    So few mismatches have no spread: of none, up to three are expected (95 %).
    """
    mean = sum(float(part.sum()) for part in parts) / sum(map(len, parts))
    largest = max(float(part.max(initial=0.0)) for part in parts)
    return max(_bound(parts), mean + 3 * largest / sum(map(len, parts)))


def _largest(margins: Scores) -> float:
    """The largest margin among `RUN_TOKENS` tokens, if large margins fall off exponentially.

    The mean excess over the largest tenth of the mismatches, plus three standard errors, is their
    rate. There are few of them, so the largest one alone says little: among 10,000 honest tokens
    it was 0.37, among 3,000 others 0.62.
    """
    found = np.sort(margins[margins > 0])
    if not len(found):
        return 0.0
    count = min(len(found), max(TAIL_MIN, len(found) // 10))
    least = float(found[-count - 1]) if count < len(found) else 0.0
    rate = float((found[-count:] - least).mean()) * (1 + 3 / math.sqrt(count))
    return max(float(found[-1]), least + rate * math.log(RUN_TOKENS * count / len(margins)))


def _digits(value: float) -> float:
    """Two significant digits, rounded up."""
    unit: float = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.2g}")


def failures(sample: Sample, evidence: Evidence, thresholds: Thresholds) -> list[str]:
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


def assess(samples: Sequence[Sample], thresholds: Thresholds) -> Assessment:
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


def roc(honest: list[float], attack: list[float]) -> tuple[list[float], list[float]]:
    """False and true positive rates, for every limit on a score."""
    limits = sorted({*honest, *attack}, reverse=True)
    false = [float(np.mean([score >= limit for score in honest])) for limit in limits]
    true = [float(np.mean([score >= limit for score in attack])) for limit in limits]
    return [0.0, *false, 1.0], [0.0, *true, 1.0]


def area(honest: list[float], attack: list[float]) -> float:
    """Area under the ROC curve: the probability that a cheat's submission scores higher."""
    wins = [(a > h) + (a == h) / 2 for a in attack for h in honest]
    return float(np.mean(wins))


def draw_roc(
    honest: Mapping[str, Assessment], attacks: Mapping[str, Assessment], path: Path
) -> None:
    """Draw the curves of all attacks as a PNG. Imports matplotlib, which takes a second.

    The score of a submission is the largest log10 of its pooled e-values.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    scores = [score for each in honest.values() for score in each.bans]
    drawing = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    axes = drawing.add_subplot()
    for name, each in attacks.items():
        label = f"{name} ({area(scores, each.bans):.3f})"
        axes.step(*roc(scores, each.bans), where="post", label=label, linewidth=1.4)
    axes.set_xscale("symlog", linthresh=1 / len(scores))
    axes.set(
        xlabel=f"share of {len(scores)} honest submissions with as high a score",
        ylabel="share of the cheat's submissions",
        xlim=(0, 1),
        ylim=(0, 1.02),
    )
    axes.set_title("one submission's evidence; in brackets: area under the curve")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", fontsize=7, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path)
