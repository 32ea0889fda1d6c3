"""Merging two fine-tunings of different tasks: which method keeps both?

    python -m benchmarks.merged_tasks --seeds 3

For each seed one weak base, which knows the form of both tasks, is tuned twice by SFT: to sort
digits, and to use a calculator. Prints one JSON object: the sampled accuracy of base, tunings and
merges on held-out prompts of both tasks, as median, least and most over the seeds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import trio

from benchmarks.arguments import at_least
from benchmarks.commands import accuracy, spread
from peers.demo.recipes import CALCULATOR, ENVIRONMENT, RECIPES, Recipe
from peers.merging.merge import Recipe as Merge
from peers.merging.merge import merge
from peers.trainer.warmup import prepare_base
from peers.tuning.service import Tuning
from swarm.jobs.offline import StartTuning, Tune, TuningSettings
from swarm.jobs.training import Export
from swarm.manifest import EnvironmentReference
from swarm.terminal.output import print_json

TASKS = {"sort-digits": ENVIRONMENT, "calculator": CALCULATOR}
SAMPLING = RECIPES["calculator"].sampling
BOTH = Recipe(title="two tasks", environments=(ENVIRONMENT, CALCULATOR), sampling=SAMPLING)
DENSITIES = (0.2, 0.5, 0.8)
"""Of TIES."""


def tune(base: Path, out: Path, reference: EnvironmentReference, seed: int, steps: int) -> None:
    """SFT on an environment's answers, as `swarm sft --environment` does it."""

    async def learn() -> None:
        service = Tuning()
        settings = TuningSettings(steps=steps, batch=64, learning_rate=1e-3, seed=seed)
        await service.start(StartTuning(model=str(base), settings=settings, environment=reference))
        for _ in range(steps):
            await service.step(Tune())
        await service.save(Export(folder=str(out)))

    trio.run(learn)


def merges(tuned: list[Path], base: Path) -> dict[str, Merge]:
    """What is compared."""
    found = {method: Merge(tuned, method) for method in ("linear", "slerp")}
    for scale in (1.0, 2.0):
        for density in DENSITIES:
            name = f"ties, density {density}" + (f", scale {scale:g}" if scale != 1 else "")
            found[name] = Merge(tuned, "ties", base=base, density=density, scale=scale)
    return found


def compare(seed: int, steps: int) -> dict[str, dict[str, float]]:
    """Accuracies of one seed's policies, by policy and task."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policies = {"base": folder / "base"}
        prepare_base(policies["base"], seed, BOTH)
        for task, reference in TASKS.items():
            policies[f"tuned on {task}"] = out = folder / task
            tune(policies["base"], out, reference, seed, steps)
        tuned = [folder / task for task in TASKS]
        for number, (label, recipe) in enumerate(merges(tuned, policies["base"]).items()):
            policies[label] = folder / f"merged-{number}"
            merge(recipe, policies[label], lambda done, total: None)
        found = {}
        for label, policy in policies.items():
            scores = [accuracy(policy, reference, SAMPLING) for reference in TASKS.values()]
            found[label] = {**dict(zip(TASKS, scores, strict=True)), "mean": sum(scores) / 2}
            print(f"seed {seed}: {label}: {found[label]}", file=sys.stderr, flush=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=at_least(1), default=3)
    parser.add_argument("--steps", type=at_least(1), default=60, help="of SFT, 64 examples each")
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs = [compare(seed, given.steps) for seed in range(given.seeds)]
    told: dict[str, Any] = {
        label: {task: spread([run[label][task] for run in runs]) for task in (*TASKS, "mean")}
        for label in runs[0]
    }
    print_json({"steps": given.steps, "accuracy": told})


if __name__ == "__main__":
    main()
