"""Process rewards (PRIME) against outcome rewards, on a demo's task, over seeds.

    python -m benchmarks.prime --seeds 5 --steps 60 --runs runs.jsonl > prime.json
    python -m benchmarks.study_plot prime.json prime.png

Variants: `grpo`, the demo's own objective; `rloo`, leave-one-out baselines and only groups with an
accuracy of 0.2 to 0.8; `prime`, the same with process rewards; each generates as many completions
per step. Prints one JSON object: for each variant the held-out sampled accuracy, the first steps in
which the mean reward of ten steps reaches each target, and CPU seconds per step, as median, least
and most over the seeds, and the curve of the reward. Finished runs are kept in the file of `--runs`
and not repeated.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from benchmarks.arguments import at_least
from benchmarks.study import Curve, Variant, band, learn
from peers.demo.recipes import OBJECTIVE, RECIPES, Recipe
from peers.environments.collection import Environments
from peers.trainer.warmup import prepare_base
from swarm.manifest import ProcessRewards
from swarm.terminal.output import print_json

TARGETS = (0.4, 0.6, 0.8)
WINDOW = 10
"""Steps whose mean reward must reach a target."""


class Run(msgspec.Struct):
    """One training."""

    seed: int
    variant: str
    held_out: float
    reward: list[float]
    process_accuracy: list[float]
    cpu_seconds: float
    """Per step."""


def variants(recipe: Recipe, given: argparse.Namespace) -> dict[str, Variant]:
    """The variants of a demo's recipe, by name."""
    rloo = replace(OBJECTIVE, advantage="rloo")
    process = ProcessRewards(
        weight=given.weight, beta=given.beta, learning_rate=given.learning_rate
    )
    common = {"optimiser": recipe.optimiser, "steps": given.steps}
    filtered = {"accuracy": (0.2, 0.8), **common}
    return {
        "grpo": Variant(**common),
        "rloo": Variant(objective=rloo, **filtered),
        "prime": Variant(objective=replace(rloo, process=process), **filtered),
    }


def reached(curve: Sequence[float], target: float) -> int | None:
    """Steps until the mean reward of `WINDOW` steps reaches the target; None: never."""
    for step in range(WINDOW, len(curve) + 1):
        if statistics.fmean(curve[step - WINDOW : step]) >= target:
            return step
    return None


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Figures of one variant over its seeds."""
    tail = [statistics.fmean(run.process_accuracy[-WINDOW:]) for run in runs]
    return {
        "held_out": spread([run.held_out for run in runs]),
        **{
            f"steps_to_{target}": [reached(run.reward, target) for run in runs]
            for target in TARGETS
        },
        "reward_of_the_last_ten": spread([statistics.fmean(run.reward[-WINDOW:]) for run in runs]),
        "process_accuracy_of_the_last_ten": spread(tail),
        "cpu_seconds_per_step": spread([run.cpu_seconds for run in runs]),
        "curve": band([run.reward for run in runs]),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    figures = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 4) for name, value in figures.items()}


def train(recipe: Recipe, base: Path, seed: int, name: str, variant: Variant) -> Run:
    """Train one variant from a seed's base."""
    (reference,) = recipe.environments
    environment = Environments(recipe.environments).of(reference)
    curve: Curve = learn(base, seed, variant, environment=environment, sampling=recipe.sampling)
    return Run(
        seed=seed,
        variant=name,
        held_out=curve.held_out,
        reward=curve.reward,
        process_accuracy=curve.process_accuracy,
        cpu_seconds=statistics.fmean(curve.cpu_seconds),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    single = [name for name, recipe in RECIPES.items() if len(recipe.environments) == 1]
    parser.add_argument("--environment", choices=single, default="sort-digits")
    parser.add_argument("--seeds", type=at_least(1), default=2, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=at_least(WINDOW), default=60)
    parser.add_argument("--weight", type=float, default=1.0, help="of the process rewards")
    parser.add_argument("--beta", type=float, default=0.05, help="of the process rewards")
    parser.add_argument("--learning-rate", type=float, default=1.2e-3, help="of their model")
    parser.add_argument("--only", nargs="*", help="names of variants; default: all")
    parser.add_argument("--runs", type=Path, help="file of finished runs, to continue")
    given = parser.parse_args()
    torch.set_num_threads(1)
    recipe = RECIPES[given.environment]
    chosen = {
        name: variant
        for name, variant in variants(recipe, given).items()
        if given.only is None or name in given.only
    }
    done: list[Run] = []
    if given.runs and given.runs.exists():
        lines = given.runs.read_bytes().splitlines()
        done = [msgspec.json.decode(line, type=Run) for line in lines]
    known = {(run.seed, run.variant) for run in done}
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder) / "base"
            for name, variant in chosen.items():
                if (seed, name) in known:
                    continue
                if not base.exists():
                    prepare_base(base, seed, recipe)
                done.append(run := train(recipe, base, seed, name, variant))
                print(f"seed {seed} {name}: {run.held_out:.3f}", file=sys.stderr, flush=True)
                if given.runs:
                    with given.runs.open("ab") as file:
                        file.write(msgspec.json.encode(run) + b"\n")
    print_json(
        {
            "environment": given.environment,
            "steps": given.steps,
            "seeds": sorted({run.seed for run in done}),
            "process": {name: vars(given)[name] for name in ("weight", "beta", "learning_rate")},
            "variants": {
                name: summary([run for run in done if run.variant == name]) for name in chosen
            },
        }
    )


if __name__ == "__main__":
    main()
