"""Studies of the trainer in one process: the demo's recipe with one part changed at a time.

    python -m benchmarks.studies asynchrony --seeds 5 --steps 250
    python -m benchmarks.studies clipping --seeds 5 --steps 250
    python -m benchmarks.studies distillation --seeds 3 --steps 100
    python -m benchmarks.studies privileged --seeds 1 --steps 25 --model FOLDER
    python -m benchmarks.studies recipes --seeds 5 --steps 80 [--model FOLDER] [--only REGEX]

Prints what each seed came to on stderr, and one JSON object: for each variant the reward's curve
over the seeds, the final reward, the effective sample size as a share of the tokens, the gradient
norm before clipping, and the share of seeds that collapse (a final reward below half of the best
mean over ten steps).

- `asynchrony`: how stale may rollouts be? Policies 0, 1, 2, 4 and 8 steps behind, for both
  denominators of the ratio (`old`). Published: up to 4 is as good as none (INTELLECT-2, §5).
- `clipping`: δ = 4 (two-sided) against none (one-sided), on rollouts six steps old and at twice the
  demo's learning rate, so that ratios leave the clipping range.
- `distillation`: a teacher against its samples and against rewards (`benchmarks.distillation`).
  `--model`: the teacher; one is made without.
- `recipes`: the losses of the named recipes (objective, advantage, ratio, mean, KL) and the
  defaults', on two tasks, with rollouts 1, 4 and 8 steps old. Learning rate, clipping of the norm
  and batch are the demo's for all: the published ones belong to other models. A batch is one
  optimiser step, or eight as INTELLECT-2 has it. `--model`: a real model learns, as in
  `benchmarks.recipe`.
- `privileged`: the policy before training, which reads the answer too, as the teacher of itself, on
  rollouts of the policy's own; mixed with rewards, alone, and rewards alone.
"""

from __future__ import annotations

import argparse
import functools
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from benchmarks.common import at_least, load_average, spread
from benchmarks.distillation import WAYS, study
from benchmarks.groups import Group
from benchmarks.recipe import HALF, Sampler, train
from peers.demo.recipes import OBJECTIVE, OPTIMISER, SCHEDULE, Recipe, recipe_of
from peers.demo.warmup import prepare_base
from peers.engines.native import NativeEngine
from peers.environments.collection import Environments
from peers.learning.batch import AcceptedGroups
from peers.learning.learner import Learner
from peers.learning.settings import LearnerSettings
from peers.trainer.privileged import PrivilegedPrompts
from swarm.jobs.training import Sharding, TrainingTerms
from swarm.run.recipes import RECIPES
from swarm.terminal.output import print_json
from swarm.wire.manifest import Objective, Optimiser, Schedule

TAIL = 10
"""Number of last steps whose mean is the final reward."""

ONE_SIDED = 1e9
"""A δ that no ratio reaches: log-ratios are clamped at 20."""


@dataclass(frozen=True)
class Variant:
    """One variant of a demo's recipe."""

    objective: Objective = OBJECTIVE
    optimiser: Optimiser | None = None
    """None: the demo's."""
    old: str = "generation"
    staleness: int = SCHEDULE.asynchrony
    """Age of the generating policy, in steps."""
    engine: Callable[[Path], NativeEngine] = NativeEngine
    log_difference_max: float = 20.0
    """What a run's thresholds would allow: here, all that the engines do."""
    task: str = "sort-digits"
    parts: int = 1
    """Optimiser steps of a batch."""

    def settings(self, seed: int, steps: int, recipe: Recipe, half: bool) -> LearnerSettings:
        schedule = Schedule(
            steps=steps,
            groups_per_step=recipe.schedule.groups_per_step,
            asynchrony=self.staleness,
            max_staleness=max(4, self.staleness),
            old="step_start" if self.old == "step_start" else "generation",
        )
        return LearnerSettings(
            self.objective,
            schedule,
            seed,
            optimiser=structs.replace(
                self.optimiser or recipe.optimiser, optimiser_steps=self.parts
            ),
            adapter=recipe.adapter,
            sharding=Sharding(mixed_precision=half),
            completion_tokens_max=recipe.sampling.max_new_tokens,
            log_difference_max=self.log_difference_max,
        )


LOSSES = {
    "defaults": (Objective(), "generation"),
    **{
        name: (Objective(**table["objective"]), table["schedule"].get("old", "generation"))
        for name, table in RECIPES.items()
        if name in ("intellect-2", "prime-rl", "trl", "scale-rl")
    },
}
"""Objective and the ratio's denominator, by recipe."""
LOSSES["intellect-2, 8 parts"] = LOSSES["intellect-2"]

TOLD = "{prompt} (The answer is {answer}.)"
"""What the teacher of `privileged` reads instead of the task's prompt."""

_FAST = structs.replace(OPTIMISER, learning_rate=2 * OPTIMISER.learning_rate)
STUDIES = {
    "asynchrony": {
        f"{old}, {age} steps old": Variant(old=old, staleness=age)
        for old in ("generation", "step_start")
        for age in (0, 1, 2, 4, 8)
    },
    "clipping": {
        side: Variant(structs.replace(OBJECTIVE, delta=delta), _FAST, staleness=6)
        for side, delta in (("two-sided", OBJECTIVE.delta), ("one-sided", ONE_SIDED))
    },
    "recipes": {
        f"{task}, {age} steps old: {name}": Variant(
            objective, old=old, staleness=age, task=task, parts=8 if "8 parts" in name else 1
        )
        for task in ("sort-digits", "calculator")
        for age in (1, 4, 8)
        for name, (objective, old) in LOSSES.items()
    },
    "privileged": {
        label: Variant(structs.replace(OBJECTIVE, teacher_weight=weight, teacher_prompt=prompt))
        for label, weight, prompt in (
            ("rewards alone", 0.0, ""),
            ("mixed", 0.5, TOLD),
            ("teacher alone", 1.0, TOLD),
        )
    },
}


@dataclass
class Curve:
    """Figures of one training, step by step."""

    reward: list[float]
    """Mean task reward of everything generated for the step."""
    effective_share: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)

    @property
    def final(self) -> float:
        return statistics.fmean(self.reward[-TAIL:])

    @property
    def collapsed(self) -> bool:
        """Whether the policy was once more than twice as good as at the end."""
        ends = range(min(TAIL, len(self.reward)), len(self.reward) + 1)
        best = max(statistics.fmean(self.reward[max(0, end - TAIL) : end]) for end in ends)
        return self.final < best / 2


@dataclass
class Bases:
    """The warmed-up policies that all variants of a task begin with, made when first asked for."""

    folder: Path
    model: Path | None = None

    def of(self, task: str, seed: int) -> tuple[Path, Recipe]:
        recipe = recipe_of(task, model=self.model)
        base = self.folder / f"{task}-{seed}"
        if not base.exists():
            prepare_base(base, seed, recipe, self.model)
        return base, recipe


def terms_of(recipe: Recipe, settings: LearnerSettings) -> TrainingTerms:
    """What a run's manifest would say of a variant."""
    return TrainingTerms(
        objective=settings.objective,
        optimiser=settings.optimiser,
        schedule=settings.schedule,
        sampling=recipe.sampling,
        environments=list(recipe.environments),
    )


def learn(bases: Bases, seed: int, variant: Variant, steps: int) -> Curve:
    """Train a task's base policy; groups without a spread of rewards are left out."""
    base, recipe = bases.of(variant.task, seed)
    loaded = Environments(recipe.environments)
    environments = [loaded.of(reference) for reference in recipe.environments]
    half = bases.model is not None and HALF
    settings = variant.settings(seed, steps, recipe, half)
    engine = functools.partial(NativeEngine, dtype=torch.bfloat16) if half else variant.engine
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(base, folder / "0")
        learner = Learner(folder / "0", settings)
        sampler = Sampler(
            folder / "0", environments, recipe.sampling, engine=engine, spread_only=True
        )
        told = PrivilegedPrompts(base, terms_of(recipe, settings))

        def tell(seed: bytes, _: Sequence[Group], accepted: Sequence[AcceptedGroups]) -> None:
            for each in accepted:
                told.give(each, seed)

        rewards, metrics = train(
            learner, sampler, folder, seed, settings.schedule, name="study", judge=tell
        )
    return Curve(
        rewards,
        [each.get("effective_share", 1.0) for each in metrics],
        [each.get("gradient_norm", 0.0) for each in metrics],
    )


def band(curves: Sequence[Sequence[float]], points: int = 20) -> dict[str, list[float]]:
    """Mean, minimum and maximum over seeds at `points` points of the curves, rounded."""
    steps = len(curves[0])
    places = sorted({round((steps - 1) * point / max(1, points - 1)) for point in range(points)})
    columns = [[curve[place] for curve in curves] for place in places]
    return {
        "step": [float(place) for place in places],
        "mean": [round(statistics.fmean(column), 4) for column in columns],
        "low": [round(min(column), 4) for column in columns],
        "high": [round(max(column), 4) for column in columns],
    }


def summary(curves: Sequence[Curve]) -> dict[str, Any]:
    """Figures of one variant over its seeds."""
    norms = sorted(norm for curve in curves for norm in curve.gradient_norm)
    shares = [share for curve in curves for share in curve.effective_share]
    return {
        **spread("final_reward", [curve.final for curve in curves], 4),
        "effective_share_mean": round(statistics.fmean(shares), 4),
        "gradient_norm_median": norms[len(norms) // 2],
        "gradient_norm_p99": norms[min(len(norms) - 1, int(len(norms) * 0.99))],
        "gradient_norm_max": norms[-1],
        "collapse_rate": sum(curve.collapsed for curve in curves) / len(curves),
        "curve": band([curve.reward for curve in curves]),
    }


def run(parser: argparse.ArgumentParser, studies: Mapping[str, Mapping[str, Variant]]) -> None:
    """Train each variant of the study that the command line names, and print the report."""
    parser.add_argument("--seeds", type=at_least(1), default=2, help="how many seeds")
    parser.add_argument("--steps", type=at_least(1), default=100)
    parser.add_argument("--only", default="", help="variants whose names match so, a regex")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="folder of a model, instead of a small one")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    report: dict[str, Any] = {**vars(given), "model": str(given.model or "")}
    report |= {"load_average": load_average(), "variants": {}}
    began = time.process_time()
    if given.study == "distillation":
        ways = {each: way for each, way in WAYS.items() if re.match(given.only, each)}
        report |= study(seeds, given.steps, ways, given.model)
        print_json({**report, "cpu_seconds": round(time.process_time() - began, 1)})
        return
    with tempfile.TemporaryDirectory() as name:
        bases = Bases(Path(name), given.model)
        for label, variant in studies[given.study].items():
            if not re.match(given.only, label):
                continue
            curves: list[Curve] = []
            for seed in seeds:
                curves.append(learn(bases, seed, variant, given.steps))
                spent = round(time.process_time() - began)
                print(f"{label}, seed {seed}: {curves[-1].final:.4f}, {spent} s", file=sys.stderr)
            report["variants"][label] = summary(curves)
    print_json({**report, "cpu_seconds": round(time.process_time() - began, 1)})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("study", choices=[*STUDIES, "distillation"])
    run(parser, STUDIES)


if __name__ == "__main__":
    main()
