"""False positives of the statistical checks, and how soon each cheat is caught.

    python -m benchmarks.recipe --seeds 1 --keep policies
    python -m benchmarks.detection --policies policies/0 --completions 300000 --seeds 20

Prints one JSON object. The demo's policies at several steps generate and are recomputed, in fp32
and bf16, with the default `[thresholds]`. Honest: every pair of dtypes, whole submissions, 64 or
three rows at a time, one thread or two; and one completion in sixteen is a segment of an episode of
up to two turns, with a calculator. Cheats: each repeats its cheat with every seed until it is
evicted, or gives up after `--submissions` submissions of the demo's size; all are recomputed.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.arguments import at_least, several
from benchmarks.turns import Episodes, make_tool_policy
from peers.calibration.calibrate import EngineClass, attacks
from peers.calibration.freedom import bits_per_token
from peers.calibration.measure import Sample, sample
from peers.calibration.thresholds import failures
from peers.calibration.workers import Generates, Worker
from peers.calibration.workload import Workload
from peers.demo.recipes import ENVIRONMENT, SAMPLING, THRESHOLDS
from peers.engines.engine import Engine
from peers.environments import load as load_environment
from peers.validator.evidence.submission import Recomputed, evidence_of
from peers.validator.recompute import Found
from swarm.ledger.evidence import WorkerEvidence
from swarm.manifest import Thresholds
from swarm.terminal.output import print_json

DTYPES = ("float32", "bfloat16")

HONEST_GROUPS = 64
"""Groups of an honest submission: larger than the demo's, because batches are faster."""

CHEAT_GROUPS = 16
"""Groups that a cheat generates at a time, for the same reason. They are cut into submissions of
the demo's size."""

ODD_SHARE = 16
"""One in so many honest submissions is generated three rows at a time, another with two threads,
another 64 rows at a time."""

TURNS_SHARE = 1 / 16
"""Share of the honest completions that are segments of episodes of several turns."""

CHOICE_SUBMISSIONS = 8
"""Submissions whose positions are counted for the choice."""

AGES = (1, 2, 5)
"""Ages of the older policies that a cheat uses."""


def honest(folder: Path, completions: int, thresholds: Thresholds) -> Iterator[dict[str, Any]]:
    """Figures of honest workers of each pair of dtypes, `completions` each."""
    sampling = replace(SAMPLING, groups_per_submission=HONEST_GROUPS)
    environment = load_environment(ENVIRONMENT.name, ENVIRONMENT.version)
    workload = Workload(folder, sampling, environment)
    engines = {dtype: EngineClass(dtype, "cpu").engine(folder) for dtype in DTYPES}

    def submit(generating: str, recomputing: str, number: int) -> Sample:
        worker = {
            0: Generates(engines[generating], batch=3),
            1: Generates(engines[generating], threads=2),
            2: Generates(engines[generating], batch=64),
        }.get(number % ODD_SHARE, Generates(engines[generating]))
        name = f"{generating} {recomputing}"
        return sample(worker, engines[recomputing], workload, number, name)

    return _pairs(submit, completions, thresholds)


def honest_turns(completions: int, thresholds: Thresholds) -> Iterator[dict[str, Any]]:
    """The same for episodes of up to two turns, of a policy that calls a calculator."""
    with tempfile.TemporaryDirectory() as name:
        episodes = Episodes(make_tool_policy(Path(name), seed=3))
        engines = {dtype: EngineClass(dtype, "cpu").engine(Path(name)) for dtype in DTYPES}

        def submit(generating: str, recomputing: str, number: int) -> Sample:
            pair = engines[generating], engines[recomputing]
            return episodes.sample(*pair, number, f"{generating} {recomputing}")

        yield from _pairs(submit, completions, thresholds)


def _pairs(
    submit: Callable[[str, str, int], Sample], completions: int, thresholds: Thresholds
) -> Iterator[dict[str, Any]]:
    """Figures of each pair of dtypes, for (generates, recomputes, number) → submission."""
    for generating, recomputing in ((a, b) for a in DTYPES for b in DTYPES):
        record, refused, figures, number = WorkerEvidence(), Counter[str](), Figures(), 0
        while figures.completions < completions:
            found = submit(generating, recomputing, number)
            evidence = evidence_of(found.recomputed, thresholds)
            refused.update(failures(found, evidence, thresholds))
            record.add("validator", evidence)
            figures.add(found)
            number += 1
        yield {
            "generates": generating,
            "recomputes": recomputing,
            "submissions": number,
            "refused": dict(refused),
            "log_capital": record.standing().log_capital,
            **figures.summary(),
        }


class Figures:
    """Sums and extremes over submissions."""

    def __init__(self) -> None:
        self.completions = self.tokens = self._mismatches = self._chunks = 0
        self._margin = self._error = self._margin_max = 0.0
        self._exponents = 128

    def add(self, found: Sample) -> None:
        """Add one submission."""
        margins, errors = found.recomputed.margins, found.recomputed.errors
        self.completions += found.completions
        self.tokens += len(margins)
        self._mismatches += int((margins > 0).sum())
        self._margin += float(margins.clip(max=1).sum())
        self._margin_max = max(self._margin_max, float(margins.max()))
        self._chunks += len(errors)
        self._error += float(errors.sum())
        least = min(chunk.exponent_matches for chunk in found.found.chunks)
        self._exponents = min(self._exponents, least)

    def summary(self) -> dict[str, float]:
        """The figures by name."""
        return {
            "completions": self.completions,
            "tokens": self.tokens,
            "mismatch_share": self._mismatches / self.tokens,
            "margin_mean": self._margin / self.tokens,
            "margin_max": self._margin_max,
            "error_mean": self._error / self._chunks,
            "exponents_min": self._exponents,
        }


def caught(
    worker: Worker, validator: Engine, workload: Workload, seed: int, most: int, limits: Thresholds
) -> dict[str, Any]:
    """One cheat until it is evicted, or has handed in `most` submissions."""
    record, refused, figures, reward = WorkerEvidence(), 0, Figures(), 0.0
    accepted = submissions = 0
    evicted = False
    for found in _submissions(worker, validator, workload, f"seed {seed}", most):
        evidence = evidence_of(found.recomputed, limits)
        failed = bool(failures(found, evidence, limits))
        refused += failed
        accepted += 0 if failed else found.completions
        record.add("validator", evidence)
        evicted = record.standing().p_value <= limits.eviction_p_value
        figures.add(found)
        reward += found.reward
        submissions += 1
        if evicted:
            break
    return {
        "evicted": evicted,
        "process": record.standing().process,
        "submissions": submissions,
        "refused": refused,
        "accepted_completions": accepted,
        "reward": reward / submissions,
        **figures.summary(),
    }


def _submissions(
    worker: Worker, validator: Engine, workload: Workload, name: str, most: int
) -> Iterator[Sample]:
    """The first submissions of the demo's size."""
    each = SAMPLING.groups_per_submission
    for number in range(-(-most * each // CHEAT_GROUPS)):
        whole = sample(worker, validator, workload, number, name)
        left = most - number * (CHEAT_GROUPS // each)
        yield from (_cut(whole, first, each) for first in range(0, CHEAT_GROUPS, each)[:left])


def _cut(whole: Sample, first: int, count: int) -> Sample:
    """The groups from `first` on as a submission of their own; each rollout has one proof."""
    found, parts = whole.found, whole.recomputed
    size = len(parts.ties[0])
    rows, groups = slice(first * size, (first + count) * size), slice(first, first + count)
    lengths = [int(length) for group in parts.outcomes[2] for length in group]
    tokens = slice(sum(lengths[: rows.start]), sum(lengths[: rows.stop]))
    assert len(found.chunks) == len(lengths)
    return Sample(
        found=Found(
            found.chunks[rows], found.errors[rows], found.margins[tokens], found.ties[rows]
        ),
        recomputed=Recomputed(
            margins=parts.margins[tokens],
            errors=parts.errors[rows],
            ties=parts.ties[groups],
            outcomes=[kind[groups] for kind in parts.outcomes],
        ),
        completions=count * size,
    )


def pooled(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One row for all seeds of a cheat."""
    evicted = [run["tokens"] for run in runs if run["evicted"]]
    tokens = sum(run["tokens"] for run in runs)
    return {
        "seeds": len(runs),
        "refused_share": sum(r["refused"] for r in runs) / sum(r["submissions"] for r in runs),
        "evicted": len(evicted),
        "tokens_until_eviction": statistics.median(evicted) if evicted else None,
        "tokens_until_eviction_max": max(evicted, default=None),
        "processes": dict(Counter(run["process"] for run in runs if run["evicted"])),
        "accepted_completions": statistics.fmean(run["accepted_completions"] for run in runs),
        "reward": statistics.fmean(run["reward"] for run in runs),
        "mismatch_share": sum(r["mismatch_share"] * r["tokens"] for r in runs) / tokens,
        "margin_mean": sum(r["margin_mean"] * r["tokens"] for r in runs) / tokens,
    }


def cheats(
    policies: Path, step: int, seeds: int, submissions: int, limits: Thresholds, matching: str
) -> dict[str, Any]:
    """Every cheat on one policy whose name matches, with the honest worker beside them."""
    environment = load_environment(ENVIRONMENT.name, ENVIRONMENT.version)
    folder, fp32 = policies / str(step), EngineClass("float32", "cpu")
    sampling = replace(SAMPLING, groups_per_submission=CHEAT_GROUPS)
    workload, validator = Workload(folder, sampling, environment), fp32.engine(folder)
    previous = [policies / str(step - age) for age in AGES if (policies / str(step - age)).exists()]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as aside:
        workers = [("honest", Generates(validator))]
        for name, worker in [*workers, *attacks(folder, Path(aside), fp32, previous)]:
            if not re.search(matching, name):
                continue
            started = time.perf_counter()
            runs = [
                caught(worker, validator, workload, seed, submissions, limits)
                for seed in range(seeds)
            ]
            rows[name] = pooled(runs)
            print(step, name, rows[name], file=sys.stderr)
            print(f"{step} {name} {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return rows


def choice(policies: Path, steps: list[int], limits: Thresholds) -> dict[int, float]:
    """Bound on the choice that the thresholds leave, in bits per token, by policy."""
    environment = load_environment(ENVIRONMENT.name, ENVIRONMENT.version)
    found = {}
    for step in steps:
        folder = policies / str(step)
        engine = EngineClass("float32", "cpu").engine(folder)
        workload = Workload(folder, SAMPLING, environment)
        found[step] = bits_per_token(engine, workload, CHOICE_SUBMISSIONS, limits)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policies", type=Path, required=True, help="folder of policies by step")
    parser.add_argument("--steps", type=several(at_least(0)), default=[0, 100, 200, 250])
    parser.add_argument("--cheat-steps", type=several(at_least(0)), default=[200])
    parser.add_argument("--completions", type=at_least(1), default=300_000, help="honest ones")
    parser.add_argument("--seeds", type=at_least(1), default=20, help="seeds of each cheat")
    parser.add_argument("--submissions", type=at_least(1), default=24, help="most of one cheat")
    parser.add_argument("--matching", default="", help="regular expression for cheats' names")
    parser.add_argument("--only", choices=["honest", "cheats"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    thresholds = THRESHOLDS
    each = -(-arguments.completions // (len(arguments.steps) * len(DTYPES) ** 2))
    result: dict[str, Any] = {"choice": choice(arguments.policies, arguments.steps, thresholds)}
    if arguments.only != "cheats":
        result["honest"] = {}
        for step in arguments.steps:
            result["honest"][step] = []
            for row in honest(arguments.policies / str(step), each, thresholds):
                result["honest"][step].append(row)
                print(step, row, file=sys.stderr)
        result["honest turns"] = []
        turns = math.ceil(TURNS_SHARE * arguments.completions / len(DTYPES) ** 2)
        for row in honest_turns(turns, thresholds):
            result["honest turns"].append(row)
            print("turns", row, file=sys.stderr)
    if arguments.only != "honest":
        result["cheats"] = {
            step: cheats(
                arguments.policies,
                step,
                arguments.seeds,
                arguments.submissions,
                thresholds,
                arguments.matching,
            )
            for step in arguments.cheat_steps
        }
    print_json(result)


if __name__ == "__main__":
    main()
