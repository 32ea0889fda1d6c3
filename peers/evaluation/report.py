"""The figures of an evaluation and their intervals: as tables to read, and as JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from peers.evaluation.run import Evaluation, Measured
from swarm.errors import UserError
from swarm.jobs.evaluation import Sample

# Figures of an evaluation: pass@k, means, and their confidence intervals. Imports no torch.
#
# pass@k is the probability that at least one of k samples solves a task. Of n samples with c right
# ones, 1 − C(n − c, k) / C(n, k) estimates it without bias (Chen et al. 2021, arXiv 2107.03374).
#
# Samples of one task are not independent, so an interval is over tasks (Miller 2024, arXiv
# 2411.00640). It is Wilson's score interval (Wilson 1927) where each task counts as wholly right
# or wholly wrong, and else the percentile bootstrap over tasks (Efron and Tibshirani 1993), which
# has no width where all tasks have the same value: then it is Wilson's too.

Z_95 = 1.959963984540054
"""Standard normal quantile of a two-sided interval of 95 %."""

RESAMPLES = 2000
"""Bootstrap samples: the ends of a 95 % interval then vary by about 2 % of its width."""

RESAMPLED_VALUES_MAX = 1 << 22
"""Most values drawn at a time, so that a large evaluation takes no more than 64 MiB."""

SEED = 2

Method = Literal["wilson", "bootstrap", "none"]


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    method: Method
    """How the interval was computed; none: one value gives no interval."""


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Estimate pass@k without bias from `solved` of `samples`; raises `ValueError` for k beyond."""
    if not 1 <= k <= samples or not 0 <= solved <= samples:
        raise ValueError(f"pass@{k} of {solved} in {samples} samples")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def wilson(share: float, trials: int) -> tuple[float, float]:
    """Wilson's score interval of a share among independent trials."""
    spread = Z_95 * math.sqrt(share * (1 - share) / trials + (Z_95 / trials / 2) ** 2)
    middle = share + Z_95**2 / trials / 2
    scale = 1 + Z_95**2 / trials
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean; equal values give equal intervals everywhere."""
    given = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(SEED)
    at_once = max(1, RESAMPLED_VALUES_MAX // len(given))
    means: list[np.ndarray] = []
    for start in range(0, RESAMPLES, at_once):
        shape = (min(at_once, RESAMPLES - start), len(given))
        means.append(given[random.integers(len(given), size=shape)].mean(axis=1))
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value per task, with its interval."""
    mean = math.fsum(values) / len(values)
    are_shares = min(values) >= 0 and max(values) <= 1
    if are_shares and (set(values) <= {0.0, 1.0} or len(set(values)) == 1):
        return Estimate(mean, *wilson(mean, len(values)), "wilson")
    if len(values) == 1:
        return Estimate(mean, mean, mean, "none")
    return Estimate(mean, *bootstrap(values), "bootstrap")


def difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """The mean of `values` minus `others`, task by task, with its paired bootstrap interval."""
    gains = [value - other for value, other in zip(values, others, strict=True)]
    mean = math.fsum(gains) / len(gains)
    if len(gains) == 1:
        return Estimate(mean, mean, mean, "none")
    return Estimate(mean, *bootstrap(gains), "bootstrap")


SOLVED = 1.0
"""Reward from which on a sample counts as right."""


def figures_of(wanted: Evaluation, measured: Measured) -> dict[str, dict[str, Any]]:
    """By environment: pass@k and mean reward with their intervals, and the samples' lengths."""
    found: dict[str, dict[str, Any]] = {}
    for label, tasks in zip(wanted.labels, measured.samples, strict=True):
        played, tasks = len(tasks), [each for each in tasks if _is_graded(each)]
        every = [sample for samples in tasks for sample in samples]
        if not every:
            raise UserError(f"no task of {label} can be graded; repair its data")
        found[label] = {
            "tasks": len(tasks),
            "ungradable": played - len(tasks),
            "samples": wanted.samples,
            "pass_at": {k: estimate(_passes(tasks, k)) for k in wanted.pass_at},
            "reward": estimate(_rewards(tasks)),
            "tokens": sum(sample.tokens for sample in every) / len(every),
            "finished": sum(sample.finished for sample in every) / len(every),
        }
    return found


def _is_graded(samples: Sequence[Sample]) -> bool:
    return not any(each.problem for each in samples)


def gains_of(wanted: Evaluation, measured: Measured, base: Measured) -> dict[str, dict[str, Any]]:
    """By environment: what a checkpoint gained over its base, task by task."""
    found = {}
    for label, *both in zip(wanted.labels, measured.samples, base.samples, strict=True):
        pairs = [each for each in zip(*both, strict=True) if all(map(_is_graded, each))]
        tasks, others = zip(*pairs, strict=True)
        found[label] = {
            "pass_at": {
                k: difference(_passes(tasks, k), _passes(others, k)) for k in wanted.pass_at
            },
            "reward": difference(_rewards(tasks), _rewards(others)),
        }
    return found


def report(wanted: Evaluation, measured: Measured, base: Measured | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "split": wanted.split,
        "temperature": None if wanted.greedy else wanted.temperatures,
        "seed": wanted.seed,
        "checkpoint": _described(wanted, measured),
    }
    if base is not None:
        found["base"] = _described(wanted, base)
        found["difference"] = _plain(gains_of(wanted, measured, base))
    return found


def _described(wanted: Evaluation, measured: Measured) -> dict[str, Any]:
    return {
        "name": measured.name,
        "hash": measured.drawn.checkpoint,
        "engine": measured.drawn.engine,
        "max_new_tokens": measured.drawn.max_new_tokens,
        "environments": _plain(figures_of(wanted, measured)),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Estimate):
        return asdict(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def tables(wanted: Evaluation, measured: Measured, base: Measured | None = None) -> list[str]:
    """The checkpoint's figures, and the comparison with its base."""
    found = [details(wanted, measured)]
    return found if base is None else [*found, comparison(wanted, measured, base)]


def details(wanted: Evaluation, measured: Measured) -> str:
    """One checkpoint's figures, a line per environment; shares in percent."""
    head = ["", "tasks", "samples", *(f"pass@{k}" for k in wanted.pass_at)]
    rows = [[*head, "reward", "tokens", "finished"]]
    for label, found in figures_of(wanted, measured).items():
        reward = found["reward"]
        rows.append(
            [
                label,
                str(found["tasks"]),
                str(found["samples"]),
                *(_percent(found["pass_at"][k]) for k in wanted.pass_at),
                f"{reward.value:.3f} [{reward.low:.3f}, {reward.high:.3f}]",
                f"{found['tokens']:.1f}",
                f"{100 * found['finished']:.1f} %",
            ]
        )
    return aligned(rows)


def comparison(wanted: Evaluation, measured: Measured, base: Measured) -> str:
    """Models as rows and environments as columns, with pass@1 (the first of `pass_at`) in percent:
    the form of INTELLECT-2's Table 1 (arXiv 2505.07291)."""
    k = wanted.pass_at[0]
    gains = gains_of(wanted, measured, base)
    rows = [[f"pass@{k}, %", *wanted.labels]]
    for each in (measured, base):
        found = figures_of(wanted, each)
        rows.append([each.name, *(_percent(found[name]["pass_at"][k]) for name in wanted.labels)])
    rows.append(
        ["difference", *(_percent(gains[name]["pass_at"][k], "+") for name in wanted.labels)]
    )
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _percent(found: Estimate, sign: str = "") -> str:
    return (
        f"{100 * found.value:{sign}.1f} [{100 * found.low:{sign}.1f}, {100 * found.high:{sign}.1f}]"
    )


def _passes(tasks: Sequence[Sequence[Sample]], k: int) -> list[float]:
    return [
        pass_at_k(len(samples), sum(each.reward >= SOLVED for each in samples), k)
        for samples in tasks
    ]


def _rewards(tasks: Sequence[Sequence[Sample]]) -> list[float]:
    return [sum(each.reward for each in samples) / len(samples) for samples in tasks]
