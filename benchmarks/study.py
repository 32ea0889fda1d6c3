"""Shared code of the trainer's studies: the demo's recipe with one part changed at a time.

A study runs in one process, without a network: a policy generates, the environment grades, the
learner steps (see `benchmarks.recipe`).
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peers.demo.recipes import ENVIRONMENT, OBJECTIVE, OPTIMISER, SAMPLING, SCHEDULE
from peers.engines.episodes import ContinuedTask, play
from peers.engines.native import NativeEngine
from peers.environments import Environment, Renderer, Task, task_of
from peers.environments import load as load_environment
from peers.environments.episodes import grade_segments
from peers.trainer.child import EVALUATION_PROMPTS
from peers.trainer.evaluation import mean_reward
from peers.trainer.learning.groups import Group, as_accepted
from peers.trainer.learning.learner import Learner
from peers.trainer.learning.settings import LearnerSettings
from peers.trainer.warmup import prepare_base
from swarm.manifest import Objective, Optimiser, Sampling, Schedule
from swarm.rollouts.continuations import whole
from swarm.rollouts.seeds import digest, environment_of_group, noise_key, submission_seed, task_seed

TAIL = 10
"""Number of last steps whose mean is the final reward."""

DRAWS_MAX = 16
"""Most batches generated for one step with refilling."""


@dataclass(frozen=True)
class Variant:
    """One variant of the recipe."""

    objective: Objective = OBJECTIVE
    optimiser: Optimiser = OPTIMISER
    old: str = "generation"
    staleness: int = SCHEDULE.asynchrony
    """Age of the generating policy, in steps."""
    groups: int = SCHEDULE.groups_per_step
    """Groups per batch."""
    refill: bool = False
    """Generate the missing groups again until `groups` groups have a spread of rewards."""
    accuracy: tuple[float, float] = (0.0, 1.0)
    """Groups with a mean reward outside are left out."""
    steps: int = 100

    def teaches(self, group: Group) -> bool:
        """Whether a group is trained on."""
        low, high = self.accuracy
        spread = max(group.rewards) - min(group.rewards)
        return spread > 0 and low <= statistics.fmean(group.rewards) <= high


@dataclass
class Curve:
    """Figures of one training, step by step."""

    reward: list[float] = field(default_factory=list)
    """Mean task reward of everything generated for the step."""
    effective_share: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    """Completions generated so far, the step's included."""
    off_target: list[float] = field(default_factory=list)
    """Mean |target − length|, where there are length targets."""
    process_accuracy: list[float] = field(default_factory=list)
    """Share of completions that the model of process rewards tells right from wrong; 0 without."""
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU time of each step: generation, training and publication."""
    held_out: float = 0.0
    """Sampled accuracy on held-out prompts, at the end."""

    @property
    def final(self) -> float:
        return statistics.fmean(self.reward[-TAIL:])


@contextmanager
def prepared_bases(seeds: int) -> Iterator[list[Path]]:
    """Folders of the demo's base policy, one per seed from 0 on, inside the block."""
    with tempfile.TemporaryDirectory() as name:
        bases = [Path(name) / str(seed) for seed in range(seeds)]
        for seed, base in enumerate(bases):
            prepare_base(base, seed)
        yield bases


@dataclass
class Sampled:
    """Groups that worker and validator would make, and figures of all completions."""

    groups: list[Group] = field(default_factory=list)
    tasks: list[tuple[Environment, Task]] = field(default_factory=list)
    """Of each group."""
    task_rewards: list[float] = field(default_factory=list)
    distances: list[int] = field(default_factory=list)
    """|target − length|"""


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
        made = Sampled(tasks=tasks)
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
            made.distances += [abs(task.target_length - length) for length in lengths]
            rewards = [
                reward - task.length_penalty(length)
                for reward, length in zip(graded, lengths, strict=True)
            ]
            made.groups.append(Group(mine, rewards, policy))
        return made

    def continuations(
        self, seed: bytes, states: Sequence[tuple[tuple[Environment, Task], Sequence[int]]]
    ) -> tuple[list[float], int]:
        """Continue each state (a task and the first tokens of a completion) by a group of
        completions; returns the mean reward of each state, and the tokens generated."""
        sampling, size = self._sampling, self._sampling.group_size
        continued = [ContinuedTask(task, prefix) for (_, task), prefix in states]
        work = [each for each in continued for _ in range(size)]
        key = noise_key(seed)
        played = play(self.engine, self._renderer, work, range(len(work)), key, sampling).rollouts
        rewards = [
            grade_segments(
                *states[row // size][0],
                self._renderer,
                whole(rollout, len(states[row // size][1])).segments,
                sampling.stop_ids,
            ).reward
            for row, rollout in enumerate(played)
        ]
        means = [
            statistics.fmean(rewards[first : first + size])
            for first in range(0, len(rewards), size)
        ]
        return means, sum(len(rollout.model_tokens) for rollout in played)

    def batch(self, seed: int, step: int, policy: int, variant: Variant) -> Sampled:
        """Make a step's batch, with refilling if the variant refills."""
        found = Sampled()
        nonce = digest("swarm/1/study", *(n.to_bytes(8, "big") for n in (seed, step)))
        for draw in range(DRAWS_MAX if variant.refill else 1):
            drawn = submission_seed("study", nonce, "me", draw)
            made = self.sample(drawn, policy, variant.groups - len(found.groups))
            found.task_rewards += made.task_rewards
            found.distances += made.distances
            for group, task in zip(made.groups, made.tasks, strict=True):
                if not variant.refill or variant.teaches(group):
                    found.groups.append(replace(group, kept=variant.teaches(group)))
                    found.tasks.append(task)
            if len(found.groups) >= variant.groups:
                break
        return found


def learn(
    base: Path,
    seed: int,
    variant: Variant,
    *,
    environment: Environment | None = None,
    sampling: Sampling = SAMPLING,
    generated_max: int | None = None,
    watch: Callable[[int, Path], bool] | None = None,
) -> Curve:
    """Train from the policy in `base`, then evaluate on held-out prompts.

    Training ends after the variant's steps, or with the step that reaches `generated_max`
    completions, or once `watch` returns true: it gets each policy's step and folder.
    """
    environment = environment or load_environment(ENVIRONMENT.name, ENVIRONMENT.version)
    curve = Curve()
    made = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(base, folder / "0")
        learner = Learner(folder / "0", _learner_settings(variant, seed, sampling))
        sampler = Sampler(folder / "0", [environment], sampling)
        for step in range(variant.steps):
            policy = max(0, step - variant.staleness)
            began = time.process_time()
            sampler.engine.load_weights(folder / str(policy), policy)
            batch = sampler.batch(seed, step, policy, variant)
            made += len(batch.task_rewards)
            metrics = learner.train_step(as_accepted(batch.groups), step)
            learner.export(folder / str(step + 1))
            if policy > 1:  # the learner holds policy 0 as its base
                shutil.rmtree(folder / str(policy - 1), ignore_errors=True)
            curve.reward.append(statistics.fmean(batch.task_rewards))
            curve.off_target.append(statistics.fmean(batch.distances))
            curve.effective_share.append(metrics.get("effective_share", 1.0))
            curve.gradient_norm.append(metrics.get("gradient_norm", 0.0))
            curve.process_accuracy.append(metrics.get("process_accuracy", 0.0))
            curve.generated.append(made)
            curve.cpu_seconds.append(time.process_time() - began)
            if generated_max is not None and made >= generated_max:
                break
            if watch is not None and watch(step + 1, folder / str(step + 1)):
                break
        sampler.engine.load_weights(folder / str(step + 1), step + 1)
        curve.held_out = mean_reward(
            sampler.engine, environment, folder / "0", sampling, prompts=EVALUATION_PROMPTS
        )
    return curve


def _learner_settings(variant: Variant, seed: int, sampling: Sampling) -> LearnerSettings:
    schedule = Schedule(
        steps=variant.steps,
        groups_per_step=variant.groups,
        asynchrony=variant.staleness,
        max_staleness=max(4, variant.staleness),
        old="step_start" if variant.old == "step_start" else "generation",
    )
    return LearnerSettings(
        variant.objective,
        schedule,
        seed,
        optimiser=variant.optimiser,
        completion_tokens_max=sampling.max_new_tokens,
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
    """Figures over seeds that every study reports."""
    finals = [curve.final for curve in curves]
    return {
        "final_reward_mean": round(statistics.fmean(finals), 4),
        "final_reward_low": round(min(finals), 4),
        "final_reward_high": round(max(finals), 4),
        "effective_share_mean": round(
            statistics.fmean(share for curve in curves for share in curve.effective_share), 4
        ),
        "curve": band([curve.reward for curve in curves]),
    }
