"""The demo's recipe in one process, without a network: do policy, sampler and learner learn?

    python -m benchmarks.recipe --environment sort-digits --seeds 2

Prints one JSON object: accuracies on 512 held-out prompts before and after, the mean reward of
every tenth of the steps, and seconds by part (wall clock; on a busy machine compare with the CPU
seconds). The environment is one of the demo's; 250 GRPO steps of 32 × 8 completions, every policy
two steps stale when it generates, old = generation, one thread.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from peers.demo.recipes import OBJECTIVE, RECIPES, Recipe
from peers.demo.warmup import prepare_base
from peers.engines.episodes import play
from peers.engines.native import NativeEngine
from peers.environments import Environment, Renderer, task_of
from peers.environments.collection import Environments
from peers.environments.episodes import grade_segments
from peers.evaluation.accuracy import mean_reward
from peers.learning.groups import Group, as_accepted
from peers.learning.learner import Learner
from peers.learning.settings import LearnerSettings
from peers.trainer.child import EVALUATION_PROMPTS
from swarm.rollouts.seeds import (
    digest,
    environment_of_group,
    noise_key,
    submission_seed,
    task_seed,
)
from swarm.terminal.output import print_json
from swarm.wire.manifest import Sampling, Schedule


class Clock:
    """Seconds by part; each part ends where the next one begins."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("prepare", "generate", "train", "publish", "evaluate"), 0.0)
        self._since = time.perf_counter()

    def spent(self, part: str) -> None:
        """Add the time since the last call to `part`."""
        self.seconds[part] += (now := time.perf_counter()) - self._since
        self._since = now


@dataclass
class Sampled:
    """Groups that worker and validator would make, and the task rewards of all completions."""

    groups: list[Group] = field(default_factory=list)
    task_rewards: list[float] = field(default_factory=list)


class Sampler:
    """Generates with a policy, and grades; `folder` holds policy 0."""

    def __init__(
        self,
        folder: Path,
        environments: Sequence[Environment],
        sampling: Sampling,
        engine: type[NativeEngine] = NativeEngine,
        weights: Sequence[float] = (1.0,),
    ) -> None:
        """`weights`: the environments' shares of the groups, relative to the sum."""
        self.engine, self._renderer = engine(folder), Renderer(folder)
        self._environments, self._weights = environments, weights
        self._sampling = sampling

    def sample(self, seed: bytes, policy: int, count: int) -> Sampled:
        """Make `count` groups like worker and validator."""
        sampling, size = self._sampling, self._sampling.group_size
        chosen = [
            self._environments[environment_of_group(seed, group, self._weights)]
            for group in range(count)
        ]
        tasks = [
            (environment, task_of(environment, task_seed(seed, group)))
            for group, environment in enumerate(chosen)
        ]
        work = [each for each in tasks for _ in range(size)]
        rows = range(count * size)
        key = noise_key(seed)
        played = play(self.engine, self._renderer, work, rows, key, sampling).rollouts
        made = Sampled()
        for index, (environment, task) in enumerate(tasks):
            mine = played[index * size : (index + 1) * size]
            graded = [
                grade_segments(
                    environment, task, self._renderer, rollout.segments, sampling.stop_ids
                ).reward
                for rollout in mine
            ]
            lengths = [len(rollout.model_tokens) for rollout in mine]
            made.task_rewards += graded
            rewards = [
                reward - task.length_penalty(length)
                for reward, length in zip(graded, lengths, strict=True)
            ]
            made.groups.append(Group(mine, rewards, policy))
        return made


def run(
    seed: int,
    steps: int,
    old: str = "generation",
    keep: Path | None = None,
    engine: type[NativeEngine] = NativeEngine,
    recipe: Recipe = RECIPES["sort-digits"],
) -> dict[str, Any]:
    """Run the whole recipe; return accuracies, rewards, and seconds by part.

    `keep` is a folder for copies of all policies, by step; `engine` generates.
    """
    clock, cpu = Clock(), time.process_time()
    loaded = Environments(recipe.environments)
    environments = [loaded.of(reference) for reference in recipe.environments]
    weights = [reference.weight for reference in recipe.environments]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = prepare_base(folder / "0", seed, recipe)
        clock.spent("prepare")
        if keep is not None:
            shutil.copytree(folder / "0", keep / "0")
        schedule = replace(recipe.schedule, steps=steps, old=old)
        settings = LearnerSettings(OBJECTIVE, schedule, seed, optimiser=recipe.optimiser)
        learner = Learner(folder / "0", settings)
        sampler = Sampler(folder / "0", environments, recipe.sampling, engine, weights)
        figures = train(learner, sampler, folder, seed, schedule, clock=clock, keep=keep)
        sampler.engine.load_weights(folder / str(steps), steps)
        sampled, greedy = (
            sum(
                weight
                / sum(weights)
                * mean_reward(
                    sampler.engine,
                    environment,
                    folder / str(steps),
                    recipe.sampling,
                    prompts=EVALUATION_PROMPTS,
                    greedy=greedy,
                )
                for environment, weight in zip(environments, weights, strict=True)
            )
            for greedy in (False, True)
        )
        clock.spent("evaluate")
    return {
        "seed": seed,
        "sft_steps": before.sft_steps,
        "sampled_accuracy_before": before.sampled,
        "sampled_accuracy_after": sampled,
        "greedy_accuracy_before": before.greedy,
        "greedy_accuracy_after": greedy,
        **figures,
        "generate_ms_per_step": 1000 * clock.seconds["generate"] / steps,
        "train_ms_per_step": 1000 * clock.seconds["train"] / steps,
        "seconds": sum(clock.seconds.values()),
        "cpu_seconds": time.process_time() - cpu,
        **{f"{part}_seconds": value for part, value in clock.seconds.items()},
    }


def train(
    learner: Learner,
    sampler: Sampler,
    folder: Path,
    seed: int,
    schedule: Schedule,
    *,
    clock: Clock,
    keep: Path | None,
) -> dict[str, Any]:
    """Take all steps; return the rewards, the share of groups without advantage, and how far the
    engine's log-probabilities were from the learner's."""
    difference = zero_advantage = 0.0
    rewards: list[float] = []
    for step in range(schedule.steps):
        policy = max(0, step - schedule.asynchrony)
        sampler.engine.load_weights(folder / str(policy), policy)
        nonce = digest("swarm/1/recipe", seed.to_bytes(8, "big"), step.to_bytes(8, "big"))
        drawn = submission_seed("recipe", nonce, "me", 0)
        made = sampler.sample(drawn, policy, schedule.groups_per_step)
        rewards.append(statistics.fmean(made.task_rewards))
        clock.spent("generate")
        metrics = learner.train_step(as_accepted(made.groups), step)
        difference = max(difference, metrics.get("engine_log_probability_difference", 0.0))
        zero_advantage += metrics["groups_zero_advantage"] / (
            schedule.groups_per_step * schedule.steps
        )
        clock.spent("train")
        learner.export(folder / str(step + 1))
        if keep is not None:
            shutil.copytree(folder / str(step + 1), keep / str(step + 1))
        if policy > 1:  # the learner holds policy 0 as its base
            shutil.rmtree(folder / str(policy - 1))
        clock.spent("publish")
    tenth = max(1, schedule.steps // 10)
    return {
        "reward_by_tenth": [
            round(statistics.fmean(rewards[start : start + tenth]), 3)
            for start in range(0, len(rewards), tenth)
        ],
        "zero_advantage_share": zero_advantage,
        "engine_log_probability_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--environment", choices=list(RECIPES), default="sort-digits")
    parser.add_argument("--seeds", type=int, default=2, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--old", choices=["generation", "step_start"], default="generation")
    parser.add_argument("--keep", type=Path, help="new folder for all policies, as SEED/STEP")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep: Path | None = arguments.keep
    results = [
        run(
            seed,
            arguments.steps,
            arguments.old,
            keep / str(seed) if keep else None,
            recipe=RECIPES[arguments.environment],
        )
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    ]
    figures = ["sampled_accuracy_before", "sampled_accuracy_after", "greedy_accuracy_after"]
    print_json(
        {
            "environment": arguments.environment,
            "steps": arguments.steps,
            "old": arguments.old,
            "median": {
                name: round(statistics.median(run[name] for run in results), 4) for name in figures
            },
            "runs": results,
        }
    )


if __name__ == "__main__":
    main()
