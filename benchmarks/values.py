"""VinePPO: is a value from continuations worth the tokens that it costs?

    python -m benchmarks.values --seeds 2

Prints one JSON object: for each variant the mean reward by step and by generated tokens, over
seeds. sort-digits, the demo's recipe with a constant learning rate (so that a step counts the same
however many follow), states every `--segment` tokens, each continued G = 8 times by the policy of
the next step's order. `group`: the group's advantage, no continuation. `part`: one state is
continued per group, as in a run with `values.share = 0.5`. `all`: every state of every rollout
that has something to teach.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.arguments import at_least
from benchmarks.study import Sampled, Sampler, prepared_bases
from peers.demo.recipes import ENVIRONMENT, OBJECTIVE, OPTIMISER, SAMPLING, SCHEDULE
from peers.environments import load as load_environment
from peers.trainer.learning.groups import as_accepted
from peers.trainer.learning.learner import Learner
from peers.trainer.learning.settings import LearnerSettings
from peers.trainer.learning.values import give_values
from peers.trainer.states import boundaries
from swarm.jobs.training import StateValue
from swarm.manifest import Values
from swarm.rollouts.seeds import digest
from swarm.terminal.output import print_json

VARIANTS = ("group", "part", "all")

STEPS_SHOWN = (20, 40, 80, 120)
TOKENS_SHOWN = (50_000, 100_000, 200_000)

WINDOW = 10
"""Steps over which a reported reward is the mean."""


@dataclass
class Curve:
    """Figures of one training, step by step."""

    reward: list[float] = field(default_factory=list)
    """Mean reward of the step's rollouts, continuations left out."""
    tokens: list[int] = field(default_factory=list)
    """Tokens generated so far, those of continuations included."""

    def at_step(self, step: int) -> float | None:
        """Mean reward of the last `WINDOW` steps before a step; None: it was not reached."""
        return (
            statistics.fmean(self.reward[max(0, step - WINDOW) : step])
            if (step <= len(self.reward))
            else None
        )

    def at_tokens(self, tokens: int) -> float | None:
        """The same at the step that had generated so many tokens; None: none had."""
        reached = [step for step, made in enumerate(self.tokens, 1) if made >= tokens]
        return self.at_step(reached[0]) if reached else None


@dataclass
class Study:
    """One training."""

    variant: str
    segment: int
    sampler: Sampler
    chooser: random.Random
    """Draws the states of `part`."""

    def values(self, made: Sampled, seed: bytes) -> tuple[list[StateValue], int]:
        """Values of states, and the tokens that they cost."""
        size, settings = SAMPLING.group_size, Values(segment_tokens=self.segment)
        found = [
            (row, position)
            for group, each in enumerate(made.groups)
            if max(each.rewards) > min(each.rewards)
            for row in range(group * size, (group + 1) * size)
            for position in boundaries(each.rollouts[row % size].model_tokens, settings)
        ]
        if self.variant == "group" or not found:
            return [], 0
        if self.variant == "part":
            rows = sorted({row for row, _ in found})
            self.chooser.shuffle(rows)
            found.sort(key=lambda each: rows.index(each[0]))
            found = found[: len(made.groups)]
        states = [
            (
                made.tasks[row // size],
                made.groups[row // size].rollouts[row % size].model_tokens[:position],
            )
            for row, position in found
        ]
        means, tokens = self.sampler.continuations(seed, states)
        values = [
            StateValue(row, position, mean)
            for (row, position), mean in zip(found, means, strict=True)
        ]
        return values, tokens


def learn(base: Path, seed: int, variant: str, steps: int, segment: int) -> Curve:
    """Train from the policy in `base`."""
    environment = load_environment(ENVIRONMENT.name, ENVIRONMENT.version)
    curve = Curve()
    schedule = replace(SCHEDULE, steps=steps)
    settings = LearnerSettings(
        OBJECTIVE,
        schedule,
        seed,
        optimiser=replace(OPTIMISER, final_learning_rate_share=1.0),
        completion_tokens_max=SAMPLING.max_new_tokens,
    )
    spent = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(base, folder / "0")
        learner = Learner(folder / "0", settings)
        sampler = Sampler(folder / "0", [environment], SAMPLING)
        study = Study(variant, segment, sampler, random.Random(seed))

        def load(step: int) -> int:
            policy = max(0, step - schedule.asynchrony)
            sampler.engine.load_weights(folder / str(policy), policy)
            return policy

        for step in range(steps):
            policy = load(step)
            nonce = [n.to_bytes(8, "big") for n in (seed, step)]
            made = sampler.sample(digest("swarm/1/values", *nonce), policy, 32)
            load(step + 1)
            values, tokens = study.values(made, digest("swarm/1/values-of", *nonce))
            accepted = as_accepted(made.groups)
            for each in accepted:
                give_values(each, values, OBJECTIVE)
            learner.train_step(accepted, step)
            learner.export(folder / str(step + 1))
            if policy > 1:  # the learner holds policy 0 as its base
                shutil.rmtree(folder / str(policy - 1), ignore_errors=True)
            spent += tokens + sum(
                len(rollout.model_tokens) for group in made.groups for rollout in group.rollouts
            )
            curve.reward.append(statistics.fmean(made.task_rewards))
            curve.tokens.append(spent)
    return curve


def spread(found: list[float | None]) -> list[float] | None:
    """Median, least and greatest; None unless every seed has a figure."""
    given = [each for each in found if each is not None]
    if len(given) < len(found):
        return None
    return [round(each, 4) for each in (statistics.median(given), min(given), max(given))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=at_least(1), default=5, help="how many seeds, from 0")
    parser.add_argument("--steps", type=at_least(1), default=120, help="steps of group and part")
    parser.add_argument("--vine-steps", type=at_least(1), default=40, help="steps of all")
    parser.add_argument("--segment", type=at_least(1), default=2, help="tokens between states")
    given = parser.parse_args()
    torch.set_num_threads(1)
    curves: dict[str, list[Curve]] = {}
    with prepared_bases(given.seeds) as bases:
        for variant in VARIANTS:
            steps = given.vine_steps if variant == "all" else given.steps
            curves[variant] = [
                learn(base, seed, variant, steps, given.segment) for seed, base in enumerate(bases)
            ]
    result: dict[str, Any] = {**vars(given), "variants": {}}
    for variant, each in curves.items():
        result["variants"][variant] = {
            "tokens_per_step": round(
                statistics.fmean(curve.tokens[-1] / len(curve.tokens) for curve in each)
            ),
            "reward_at_step": {
                step: spread([curve.at_step(step) for curve in each]) for step in STEPS_SHOWN
            },
            "reward_at_tokens": {
                tokens: spread([curve.at_tokens(tokens) for curve in each])
                for tokens in TOKENS_SHOWN
            },
        }
    print_json(result)


if __name__ == "__main__":
    main()
