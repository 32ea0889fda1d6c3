"""False positives of the statistical checks, and how soon each cheat is caught.

    python -m benchmarks.recipe --seeds 1 --keep policies
    python -m benchmarks.detection --policies policies/0 --completions 300000 --seeds 20

Prints one JSON object. The demo's policies at several steps generate and are recomputed, in fp32
and bf16, with the default `[thresholds]`. Honest: every pair of dtypes, whole submissions, 64 or
three rows at a time, one thread or two. Cheats: each repeats its cheat with every seed until it is
evicted, or gives up after `--submissions` submissions of the demo's size; all are recomputed.
`kept` are the completions that were accepted before the eviction; `choice` bounds the choice that
the thresholds leave, in bits per token, by policy.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from benchmarks.common import at_least, several
from peers.calibration.calibrate import EngineClass
from peers.demo.recipes import ENVIRONMENT, SAMPLING, THRESHOLDS
from peers.engines.engine import Engine
from peers.engines.noise import gumbel_noise
from peers.environments import load as load_environment
from swarm.terminal.output import print_json
from swarm.wire.manifest import Sampling, Thresholds
from tests.attacks.assessment import Assessment, Judged, assess, judge
from tests.attacks.cheats import Generates, GradedWorkload, Worker, attacks

DTYPES = ("float32", "bfloat16")

HONEST_GROUPS = 64
"""Groups of an honest submission: larger than the demo's, because batches are faster."""

ODD_SHARE = 16
"""One in so many honest submissions is generated three rows at a time, another with two threads,
another 64 rows at a time."""

CHOICE_SUBMISSIONS = 8
"""Submissions whose positions are counted for the choice."""

AGES = (1, 2, 5)
"""Ages of the older policies that a cheat uses."""


def workload_of(folder: Path, sampling: Sampling = SAMPLING) -> GradedWorkload:
    return GradedWorkload(
        folder, sampling, [load_environment(ENVIRONMENT.name, ENVIRONMENT.version)]
    )


def honest(folder: Path, completions: int) -> Iterator[dict[str, Any]]:
    """Figures of honest workers of each pair of dtypes, `completions` each."""
    workload = workload_of(folder, replace(SAMPLING, groups_per_submission=HONEST_GROUPS))
    engines = {dtype: EngineClass(dtype, "cpu").engine(folder) for dtype in DTYPES}
    for generating, recomputing in ((a, b) for a in DTYPES for b in DTYPES):
        found: list[Judged] = []
        while sum(each.completions for each in found) < completions:
            worker = {
                0: Generates(engines[generating], batch=3),
                1: Generates(engines[generating], threads=2),
                2: Generates(engines[generating], batch=64),
            }.get(len(found) % ODD_SHARE, Generates(engines[generating]))
            name = f"{generating} {recomputing}"
            found.append(judge(worker, engines[recomputing], workload, len(found), name))
        assessed = assess(found, THRESHOLDS)
        told = {"generates": generating, "recomputes": recomputing, **dataclasses.asdict(assessed)}
        yield told | {"bans": max(assessed.bans)}


def caught(
    worker: Worker, validator: Engine, workload: GradedWorkload, seed: int, most: int
) -> Assessment:
    """One cheat until it is evicted, or has handed in `most` submissions."""
    found: list[Judged] = []
    while True:
        found.append(judge(worker, validator, workload, len(found), f"seed {seed}"))
        assessed = assess(found, THRESHOLDS)
        if assessed.tokens_until_eviction is not None or len(found) == most:
            return assessed


def pooled(runs: list[Assessment]) -> dict[str, Any]:
    """One row for all seeds of a cheat."""
    evicted = [run.tokens for run in runs if run.tokens_until_eviction is not None]
    tokens = sum(run.tokens for run in runs)
    return {
        "seeds": len(runs),
        "refused_share": sum(r.refused for r in runs) / sum(r.submissions for r in runs),
        "evicted": len(evicted),
        "tokens_until_eviction": statistics.median(evicted) if evicted else None,
        "tokens_until_eviction_max": max(evicted, default=None),
        "processes": dict(Counter(r.process for r in runs if r.tokens_until_eviction is not None)),
        "kept": statistics.fmean(
            (run.submissions - run.refused) * run.completions / run.submissions for run in runs
        ),
        "reward": statistics.fmean(run.reward for run in runs),
        "mismatch_share": sum(run.mismatch_share * run.tokens for run in runs) / tokens,
        "margin_mean": sum(run.mean_margin * run.tokens for run in runs) / tokens,
    }


def cheats(
    policies: Path, step: int, seeds: int, submissions: int, matching: str
) -> dict[str, Any]:
    """Every cheat on one policy whose name matches, with the honest worker beside them."""
    folder, fp32 = policies / str(step), EngineClass("float32", "cpu")
    workload, validator = workload_of(folder), fp32.engine(folder)
    previous = [policies / str(step - age) for age in AGES if (policies / str(step - age)).exists()]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as aside:
        workers = [("honest", Generates(validator))]
        for name, worker in [*workers, *attacks(folder, Path(aside), fp32, previous)]:
            if re.search(matching, name):
                rows[name] = pooled(
                    [
                        caught(worker, validator, workload, seed, submissions)
                        for seed in range(seeds)
                    ]
                )
                print(step, name, rows[name], file=sys.stderr)
    return rows


# How much choice the tolerated mismatches leave a worker, in bits.
#
# A worker who is never to be evicted must keep its mean of min(margin, 1) at or below
# `honest_margin`, and every margin at or below `margin_max`. The number of texts that do is an
# upper bound on its choice. Following the capacity arguments of arXiv 2511.02620: with m the
# capped margins of all tokens v at a position, and any β > 0,
#
#     number of texts with Σ m ≤ B  ≤  e^(βB) · Π over positions of Σ over v of e^(−βm)
#
# because each such text contributes at least e^(−βB) to the product. The least over a grid of β is
# the bound. It counts choices at the positions of the sampled text; other texts have other
# positions, but alike ones on average.

BETAS = (1.0, 4.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0, 5120.0)


def log_choices(perturbed: Tensor, margin_max: float) -> list[float]:
    """log Σ e^(−βm) summed over positions, for each β, from perturbed logits [n, vocabulary]."""
    margins = perturbed.amax(-1, keepdim=True) - perturbed
    capped = margins.clamp(max=1.0).masked_fill(margins > margin_max, torch.inf)
    return [float(torch.logsumexp(-beta * capped.double(), -1).sum()) for beta in BETAS]


def bits(log_sums: Sequence[float], positions: int, honest_margin: float) -> float:
    """The bound in bits on the choice at so many positions."""
    budget = honest_margin * positions
    nats = min(beta * budget + total for beta, total in zip(BETAS, log_sums, strict=True))
    return nats / math.log(2)


@torch.inference_mode()
def bits_per_token(
    engine: Engine, workload: GradedWorkload, submissions: int, thresholds: Thresholds
) -> float:
    """The bound on honest submissions of an engine, per token."""
    totals, positions, sampling = [0.0] * len(BETAS), 0, workload.sampling
    for number in range(submissions):
        work = workload.work(number)
        for row, tokens in enumerate(Generates(engine).submit(work, sampling).completions):
            prompt, count = work.prompts[row], len(tokens)
            sampled = list(range(len(prompt), len(prompt) + count))
            states = engine.prefill([[*prompt, *tokens]], [sampled]).states[0]
            noise = gumbel_noise(
                work.key(),
                torch.tensor(row),
                torch.arange(count),
                engine.capabilities.vocabulary_size,
            )
            perturbed = engine.logits(states) / sampling.temperature + noise
            sums = log_choices(perturbed, thresholds.margin_max)
            totals = [total + more for total, more in zip(totals, sums, strict=True)]
            positions += count
    return bits(totals, positions, thresholds.honest_margin) / positions


def choice(folder: Path) -> float:
    """Bound on the choice that the thresholds leave, in bits per token."""
    engine = EngineClass("float32", "cpu").engine(folder)
    return bits_per_token(engine, workload_of(folder), CHOICE_SUBMISSIONS, THRESHOLDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policies", type=Path, required=True, help="folder of policies by step")
    parser.add_argument("--steps", type=several(at_least(0)), default=[0, 100, 200, 250])
    parser.add_argument("--cheat-steps", type=several(at_least(0)), default=[200])
    parser.add_argument("--completions", type=at_least(1), default=300_000, help="honest ones")
    parser.add_argument("--seeds", type=at_least(1), default=20, help="seeds of each cheat")
    parser.add_argument("--submissions", type=at_least(1), default=24, help="most of one cheat")
    parser.add_argument("--matching", default="", help="regular expression for cheats' names")
    parser.add_argument("--only", choices=["honest", "cheats"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    each = -(-given.completions // (len(given.steps) * len(DTYPES) ** 2))
    result: dict[str, Any] = {
        "choice": {step: choice(given.policies / str(step)) for step in given.steps}
    }
    if given.only != "cheats":
        result["honest"] = {
            step: list(honest(given.policies / str(step), each)) for step in given.steps
        }
    if given.only != "honest":
        result["cheats"] = {
            step: cheats(given.policies, step, given.seeds, given.submissions, given.matching)
            for step in given.cheat_steps
        }
    print_json(result)


if __name__ == "__main__":
    main()
