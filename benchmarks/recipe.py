"""A recipe in one process, without a network: do policy, sampler and learner learn?

    python -m benchmarks.recipe --environment sort-digits --seeds 2
    python -m benchmarks.recipe --model SmolLM2-135M-Instruct --seeds 1
    python -m benchmarks.recipe --run run.toml --seeds 1
    SWARM_ENVIRONMENTS=terminal python -m benchmarks.recipe --environment terminal --seeds 3

Prints one JSON object: accuracies on 512 (`--prompts`) held-out prompts before and after, the mean
reward of every tenth of the steps, and seconds (on a busy machine compare CPU seconds, which are
those of this process: policies are evaluated in another). The environment is one of the demo's; 250
GRPO steps of 32 × 8 completions (`terminal`: 120 of 16 × 8), every policy two steps stale when it
generates, old = generation, one thread. With `--model`, it is what `swarm demo --model` does,
warm-up included, in its dtype. With `--run`, model, environments and settings are those of a run's
TOML file, and engines compute in fp32.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import trio
from msgspec.structs import replace

from benchmarks.groups import Group, as_accepted
from benchmarks.terminal_tasks import generated, lines_of
from peers.demo.recipes import (
    OBJECTIVE,
    OPTIMISER,
    RECIPES,
    SAMPLING,
    SCHEDULE,
    Recipe,
    Warmup,
    recipe_of,
)
from peers.demo.warmup import prepare_base
from peers.engines.adapter_config import is_adapter
from peers.engines.device import find_dtype
from peers.engines.episodes import play
from peers.engines.native import NativeEngine
from peers.environments import Environment, Renderer, task_of
from peers.environments.collection import Environments
from peers.environments.episodes import grade_segments
from peers.evaluation.run import accuracies
from peers.learning.batch import AcceptedGroups
from peers.learning.learner import Learner
from peers.learning.settings import LearnerSettings
from swarm.errors import UserError
from swarm.jobs.evaluation import Evaluated
from swarm.jobs.training import Sharding
from swarm.rollouts import seeds
from swarm.rollouts.seeds import digest, submission_seed
from swarm.run.toml import unhashed_manifest
from swarm.shardcast.manifest import BASE_NAME
from swarm.terminal.output import print_json
from swarm.wire.manifest import EnvironmentReference, OptionValue, RunManifest, Sampling, Schedule
from swarm.world.compute import LocalCompute


def terminal(folder: Path) -> Recipe:
    """Write a file by a shell; no demo's, since a run with a terminal must be served."""
    path = folder / "tasks.jsonl"
    path.write_bytes(lines_of(generated(4_000, 0, bare=True)))
    options: dict[str, OptionValue] = {"path": str(path), "statement": "bare"}
    return replace(
        RECIPES["tools"],
        title="write a file by a shell",
        environments=[EnvironmentReference(name="terminal", version="1", options=options)],
        sampling=replace(SAMPLING, max_new_tokens=32),
        schedule=replace(SCHEDULE, steps=120, groups_per_step=16),
        optimiser=replace(OPTIMISER, learning_rate=1e-3),
        warmup=Warmup(batch=64, steps_max=1000, accuracy=0.15),
    )


HALF = find_dtype("fastest", torch.device("cpu")) is torch.bfloat16
"""Whether a demo with a model computes in bf16."""

Judge = Callable[[bytes, Sequence[Group], Sequence[AcceptedGroups]], None]
"""Gives accepted groups advantages of their own; gets the seed that drew the groups, too."""


class Sampler:
    """Generates with a policy, and grades; `folder` holds policy 0."""

    def __init__(
        self,
        folder: Path,
        environments: Sequence[Environment],
        sampling: Sampling,
        engine: Callable[[Path], NativeEngine] = NativeEngine,
        weights: Sequence[float] = (1.0,),
        spread_only: bool = False,
    ) -> None:
        """`weights`: the environments' shares of the groups, relative to the sum. `spread_only`: no
        group of equal rewards is kept."""
        self.engine, self._renderer = engine(folder), Renderer(folder)
        self._environments, self._weights = environments, weights
        self._sampling, self._spread_only = sampling, spread_only

    def sample(self, seed: bytes, policy: int, count: int) -> tuple[list[Group], list[float]]:
        """Make `count` groups like worker and validator; also the task rewards of all."""
        sampling, size = self._sampling, self._sampling.group_size
        chosen = [
            self._environments[seeds.environment_of_group(seed, group, self._weights)]
            for group in range(count)
        ]
        tasks = [
            (environment, task_of(environment, seeds.task_seed(seed, group)))
            for group, environment in enumerate(chosen)
        ]
        work = [each for each in tasks for _ in range(size)]
        rows = range(count * size)
        key = seeds.noise_key(seed)
        played = play(self.engine, self._renderer, work, rows, key, sampling).rollouts
        groups: list[Group] = []
        task_rewards: list[float] = []
        for index, (environment, task) in enumerate(tasks):
            mine = played[index * size : (index + 1) * size]
            graded = [
                grade_segments(
                    environment, task, self._renderer, rollout.segments, sampling.stop_ids
                ).reward
                for rollout in mine
            ]
            lengths = [len(rollout.model_tokens) for rollout in mine]
            task_rewards += graded
            rewards = [
                reward - task.length_penalty(length)
                for reward, length in zip(graded, lengths, strict=True)
            ]
            kept = not self._spread_only or max(rewards) > min(rewards)
            groups.append(Group(mine, rewards, policy, kept, temperature=sampling.temperature))
        return groups, task_rewards


def run(
    seed: int,
    steps: int,
    old: str = "generation",
    keep: Path | None = None,
    engine: Callable[[Path], NativeEngine] = NativeEngine,
    recipe: Recipe = RECIPES["sort-digits"],
    of_run: RunManifest | None = None,
    prompts: int = 512,
    model: Path | None = None,
) -> dict[str, Any]:
    """Run the whole recipe; return accuracies, rewards and seconds.

    `keep` is a folder for copies of all policies, by step; `engine` generates.
    `of_run`: take the model and the objective from a run. `model`: a folder whose policy is warmed
    up, instead of random weights.
    """
    began, cpu = time.perf_counter(), time.process_time()
    named = {each.name for each in recipe.environments}  # in the user's own file
    loaded = Environments(recipe.environments, allowed=named)
    environments = [loaded.of(reference) for reference in recipe.environments]
    weights = [reference.weight for reference in recipe.environments]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if of_run is None:
            warmed_up = prepare_base(folder / "0", seed, recipe, model)
            print(f"warmed up in {warmed_up} steps", file=sys.stderr, flush=True)
        else:
            shutil.copytree(of_run.model, folder / "0")
        schedule = replace(recipe.schedule, steps=steps, old=old)
        settings = LearnerSettings(
            of_run.objective if of_run else OBJECTIVE,
            schedule,
            seed,
            optimiser=recipe.optimiser,
            adapter=recipe.adapter,
            sharding=Sharding(mixed_precision=model is not None and HALF),
        )
        sampler = Sampler(folder / "0", environments, recipe.sampling, engine, weights)

        def measured(policy: int) -> Evaluated:
            policy_folder, sampling = folder / str(policy), recipe.sampling
            given = (LocalCompute(), policy_folder, recipe.environments, sampling, prompts)
            return trio.run(accuracies, *given)

        before = measured(0)
        if keep is not None:
            shutil.copytree(folder / "0", keep / "0")
        learner = Learner(folder / "0", settings)
        rewards, metrics = train(learner, sampler, folder, seed, schedule, keep=keep)
        after = measured(steps)
    tenth = max(1, steps // 10)
    return {
        "seed": seed,
        "sampled_accuracy_before": before.sampled,
        "sampled_accuracy_after": after.sampled,
        "greedy_accuracy_before": before.greedy,
        "greedy_accuracy_after": after.greedy,
        "reward_by_tenth": [
            round(statistics.fmean(rewards[start : start + tenth]), 3)
            for start in range(0, steps, tenth)
        ],
        "engine_log_probability_difference": max(
            each.get("engine_log_probability_difference", 0.0) for each in metrics
        ),
        "trained_tokens": sum(each.get("trained_tokens", 0.0) for each in metrics),
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
    }


def train(
    learner: Learner,
    sampler: Sampler,
    folder: Path,
    seed: int,
    schedule: Schedule,
    *,
    name: str = "recipe",
    keep: Path | None = None,
    judge: Judge | None = None,
) -> tuple[list[float], list[dict[str, float]]]:
    """Take all steps; return mean task rewards and metrics. `name` decides the tasks."""
    rewards, metrics = [], []
    for step in range(schedule.steps):
        policy = max(0, step - schedule.asynchrony)
        sampler.engine.load_weights(folder / str(policy), policy)
        nonce = digest(f"swarm/1/{name}", *(n.to_bytes(8, "big") for n in (seed, step)))
        drawn = submission_seed(name, nonce, "me", 0)
        groups, task_rewards = sampler.sample(drawn, policy, schedule.groups_per_step)
        rewards.append(statistics.fmean(task_rewards))
        print(f"step {step}: mean reward {rewards[-1]:.3f}", file=sys.stderr, flush=True)
        any_reward = not learner.settings.objective.needs_spread
        accepted = as_accepted(groups, any_reward=any_reward)
        if judge is not None:
            judge(drawn, groups, accepted)
        metrics.append(learner.train_step(accepted, step))
        learner.export(folder / str(step + 1))
        if is_adapter(folder / str(step + 1)):
            (folder / str(step + 1) / BASE_NAME).write_text("../0")
        if keep is not None:
            shutil.copytree(folder / str(step + 1), keep / str(step + 1))
        if policy > 1:  # the learner holds policy 0 as its base
            shutil.rmtree(folder / str(policy - 1))
    return rewards, metrics


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    choices = [*RECIPES, "terminal"]
    parser.add_argument("--environment", choices=choices, default="sort-digits")
    parser.add_argument("--model", type=Path, help="folder of a model, instead of a small one")
    parser.add_argument("--run", type=Path, help="a run's TOML file, instead of a demo")
    parser.add_argument("--seeds", type=int, default=2, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: the recipe's, 250 of a demo")
    parser.add_argument("--old", choices=["generation", "step_start"])
    parser.add_argument("--prompts", type=int, default=512, help="held-out")
    parser.add_argument("--keep", type=Path, help="new folder for all policies, as SEED/STEP")
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    of_run = None
    if arguments.environment == "terminal":
        recipe = terminal(Path(tempfile.mkdtemp()))
    else:
        recipe = recipe_of(arguments.environment, model=arguments.model)
    engine: Callable[[Path], NativeEngine] = NativeEngine
    if arguments.model is not None:
        engine = functools.partial(NativeEngine, dtype=torch.bfloat16 if HALF else torch.float32)
    if arguments.run is not None:
        try:
            of_run = unhashed_manifest(arguments.run)
            if not Path(of_run.model).is_dir():
                raise UserError(
                    f"{arguments.run}: model is {of_run.model}; there is no such folder"
                )
        except UserError as error:
            parser.error(str(error))
        engine = functools.partial(NativeEngine, dtype=torch.float32)  # as workers on CPUs
        recipe = Recipe(
            title=of_run.name,
            environments=of_run.environments,
            sampling=of_run.sampling,
            schedule=of_run.schedule,
            optimiser=of_run.optimiser,
            adapter=of_run.adapter,
        )
    steps = arguments.steps or recipe.schedule.steps
    results = [
        run(
            seed,
            steps,
            arguments.old or recipe.schedule.old,
            arguments.keep / str(seed) if arguments.keep else None,
            engine=engine,
            recipe=recipe,
            of_run=of_run,
            prompts=arguments.prompts,
            model=arguments.model,
        )
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    ]
    figures = ["sampled_accuracy_before", "sampled_accuracy_after", "greedy_accuracy_after"]
    print_json(
        {
            "environment": str(arguments.run or arguments.environment),
            "steps": steps,
            "median": {
                name: round(statistics.median(run[name] for run in results), 4) for name in figures
            },
            "runs": results,
        }
    )


if __name__ == "__main__":
    main()
