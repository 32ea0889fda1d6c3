"""Two RL swarms on different tasks that exchange through the outer loop, in one process.

    python -m benchmarks.merging --seeds 5 > merging.json
    python -m benchmarks.merging_plot merging.json merging.png

Both begin with one base policy that was warmed up on both tasks, sorting digits and a calculator.
The RL learner, the exchange folder, the contributions and the merge are those of real peers; only
the network is missing. A merge arrives one step after its snapshot. Arms, all measured on held-out
prompts of both tasks, sampled:

- *alone, sort-digits* and *alone, calculator*: one swarm without exchange;
- *merged*: both, with an exchange every `--inner-steps` steps (measured: the last outer state);
- *left*: the swarm on sort-digits, whose partner leaves half-way; it goes on alone;
- *mixture*: one swarm that trains on both tasks, for as many steps as both swarms together.

Prints one JSON object with the accuracies: median, range, and every seed's.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import torch
import trio
from msgspec.structs import replace

from benchmarks.arguments import at_least
from benchmarks.spread import spread
from benchmarks.study import Sampler
from peers.demo.recipes import CALCULATOR, ENVIRONMENT, OBJECTIVE, RECIPES, Recipe
from peers.engines.native import NativeEngine
from peers.environments.collection import Environments
from peers.outer.learning.exchange_service import ExchangingService
from peers.trainer.evaluation import mean_reward
from peers.trainer.learning.groups import as_accepted
from peers.trainer.learning.learner import Learner
from peers.trainer.learning.settings import LearnerSettings
from peers.trainer.warmup import prepare_base
from swarm.jobs.exchange import (
    AnswerSnapshot,
    ContributeSnapshot,
    LookForSnapshot,
    StartExchange,
)
from swarm.jobs.outer import Contributed, ExportState, FirstState, MergeRound
from swarm.jobs.training import Snapshot
from swarm.manifest import Compression, EnvironmentReference
from swarm.rollouts.seeds import digest, submission_seed
from swarm.terminal.output import print_json

TASKS = (ENVIRONMENT, CALCULATOR)
RECIPE = replace(RECIPES["calculator"].sampling, max_new_tokens=16)
BOTH = Recipe(title="sort digits, and arithmetic with a tool", environments=TASKS, sampling=RECIPE)
KEPT = 6
"""Newest policies kept on disk."""


@dataclass(frozen=True)
class Plan:
    """The figures of one comparison."""

    steps: int
    inner_steps: int
    groups: int
    prompts: int
    compression: Compression
    learning_rate: float
    momentum: float


class RlSwarm:
    """A swarm that trains on some tasks: generates, grades, learns. Its policies are in `folder`,
    with the base as policy 0."""

    def __init__(
        self,
        base: Path,
        folder: Path,
        tasks: Sequence[EnvironmentReference],
        steps: int,
        seed: int,
        groups: int,
    ) -> None:
        shutil.copytree(base, folder / "0")
        loaded = Environments(TASKS)
        self._schedule = replace(BOTH.schedule, steps=steps, groups_per_step=groups)
        settings = LearnerSettings(OBJECTIVE, self._schedule, seed, optimiser=BOTH.optimiser)
        self.learner = Learner(folder / "0", settings)
        self.folder = folder
        self.rewards: list[float] = []
        self._sampler = Sampler(
            folder / "0",
            [loaded.of(each) for each in tasks],
            BOTH.sampling,
            weights=[1.0] * len(tasks),
        )
        self._name = "+".join(each.name for each in tasks)
        self._seed = seed

    def train(self) -> None:
        """Take a step; `publish` completes it."""
        step = self.learner.step
        policy = max(0, step - self._schedule.asynchrony)
        self._sampler.engine.load_weights(self.folder / str(policy), policy)
        parts = self._name.encode(), self._seed.to_bytes(8, "big"), step.to_bytes(8, "big")
        nonce = digest("swarm/1/merging", *parts)
        drawn = submission_seed("merging", nonce, "me", 0)
        made = self._sampler.sample(drawn, policy, self._schedule.groups_per_step)
        self.rewards.append(statistics.fmean(made.task_rewards))
        self.learner.train_step(as_accepted(made.groups), step)

    def publish(self, handed: Snapshot | None = None) -> None:
        """Write the newest policy, and a snapshot for the replica."""
        self.learner.begin_save(None, self.folder / str(self.learner.step), handed=handed)
        self.learner.finish_save()
        if self.learner.step > KEPT:  # policy 0 is the base
            shutil.rmtree(self.folder / str(self.learner.step - KEPT), ignore_errors=True)

    @property
    def policy(self) -> Path:
        return self.folder / str(self.learner.step)


@dataclass
class Merger:
    """A swarm's replica, and its exchange folder."""

    swarm: RlSwarm
    folder: Path
    plan: Plan
    number: int = 0
    """Number of the newest snapshot."""
    adopted: int = 0
    service: ExchangingService = field(default_factory=ExchangingService)

    @property
    def exchange(self) -> Path:
        return self.folder / "exchange"

    async def begin(self, base: Path) -> str:
        await self.service.start_exchange(
            StartExchange(
                model=str(base),
                exchange=str(self.exchange),
                inner_steps=self.plan.inner_steps,
                compression=self.plan.compression,
                number=0,
            )
        )
        first = str(self.folder / "anchor-0")
        await self.service.first_state(FirstState(folder=first))
        return first

    def step(self, due: bool) -> None:
        """Take a step, adopt the answer to the last snapshot, and hand out the next if it is
        `due`."""
        self.swarm.train()
        if self.number > self.adopted:
            found = self.swarm.learner.adopt(self.exchange, self.number)
            assert not found.problem, found.problem
            self.adopted = self.number
        handed = None
        if due:
            self.number += 1
            handed = Snapshot(
                exchange=str(self.exchange),
                number=self.number,
                adopted=self.adopted,
                steps=self.plan.inner_steps,
            )
        self.swarm.publish(handed)

    async def contribute(self) -> Contributed:
        seen = await self.service.look_for_snapshot(LookForSnapshot())
        assert seen.number == self.number and not seen.problem, seen
        job = ContributeSnapshot(
            number=self.number,
            anchor=str(self.folder / f"anchor-{self.adopted}"),
            contribution=self._contribution(),
        )
        found = await self.service.contribute_snapshot(job)
        assert not found.problem, found.problem
        return Contributed(
            trainer=self.folder.name, folder=job.contribution, tokens=max(1, seen.steps)
        )

    def _contribution(self) -> str:
        return str(self.folder / f"contribution-{self.number}")

    async def answer(self, state: str, others: int) -> None:
        await self.service.answer_snapshot(
            AnswerSnapshot(
                number=self.number,
                state=state,
                anchor=str(self.folder / f"anchor-{self.adopted}"),
                contribution=self._contribution(),
                keep=str(self.folder / f"anchor-{self.number}"),
                round=self.number,
                trainers=others,
            )
        )


async def exchange(mergers: Sequence[Merger], state: str, after: str, plan: Plan) -> None:
    """One round of the outer loop, from the outer state in one folder to that in another."""
    given = [await each.contribute() for each in mergers]
    await mergers[0].service.merge(
        MergeRound(
            state=state,
            contributions=given,
            momentum=plan.momentum,
            learning_rate=plan.learning_rate,
            folder=after,
        )
    )
    for each in mergers:
        await each.answer(after, len(mergers) - 1)


class Measured:
    """Sampled accuracies on held-out prompts."""

    def __init__(self, base: Path, prompts: int) -> None:
        self._engine, self._base, self._prompts = NativeEngine(base), base, prompts
        loaded = Environments(TASKS)
        self._tasks = {each.name: loaded.of(each) for each in TASKS}

    def of(self, policy: Path) -> dict[str, float]:
        self._engine.load_weights(policy, 0)
        found = {
            name: mean_reward(self._engine, task, self._base, BOTH.sampling, prompts=self._prompts)
            for name, task in self._tasks.items()
        }
        return {**found, "mean": statistics.fmean(found.values())}


async def merged(base: Path, folder: Path, seed: int, plan: Plan, leaves: int) -> dict[str, Path]:
    """Train two swarms that exchange. Returns the policies: of the swarms, of the last outer state,
    and of the first swarm if the second leaves after `leaves` steps."""
    mergers = []
    for task in TASKS:
        (home := folder / task.name).mkdir(parents=True)
        swarm = RlSwarm(base, home, [task], plan.steps, seed, plan.groups)
        mergers.append(Merger(swarm, home, plan))
    states = [await each.begin(base) for each in mergers]
    state = states[0]
    left: Path | None = None
    for step in range(1, plan.steps + 1):
        due = step % plan.inner_steps == 0
        for each in mergers:
            each.step(due)
        if due:
            after = str(folder / f"state-{step}")
            await exchange(mergers, state, after, plan)
            state = after
        if step == leaves:
            left = await go_on_alone(mergers[0], base, folder / "left", state, seed)
    await mergers[0].service.export_state(ExportState(state=state, folder=str(folder / "outer")))
    swarms = {
        f"merged, {task.name}": each.swarm.policy for task, each in zip(TASKS, mergers, strict=True)
    }
    assert left is not None
    return {**swarms, "merged": folder / "outer", "left": left}


async def go_on_alone(before: Merger, base: Path, folder: Path, state: str, seed: int) -> Path:
    """Train a copy of a swarm to the end, whose partner has left."""
    plan = before.plan
    before.swarm.learner.save(folder / "saved")
    swarm = RlSwarm(base, folder, [TASKS[0]], plan.steps, seed, plan.groups)
    policies = {}
    for policy in before.swarm.folder.glob("[0-9]*"):
        policies[int(policy.name)] = folder / policy.name
        shutil.copytree(policy, folder / policy.name, dirs_exist_ok=True)
    swarm.learner.load(folder / "saved", policies)
    alone = Merger(swarm, folder, plan, before.number, before.adopted)
    await alone.begin(base)
    for kind in ("exchange", f"anchor-{before.adopted}", f"anchor-{before.number}"):
        shutil.copytree(before.folder / kind, folder / kind, dirs_exist_ok=True)
    while swarm.learner.step < plan.steps:
        step = swarm.learner.step + 1
        due = step % plan.inner_steps == 0
        alone.step(due)
        if due:
            after = str(folder / f"state-{step}")
            await exchange([alone], state, after, plan)
            state = after
    return swarm.policy


def alone(
    base: Path,
    folder: Path,
    tasks: Sequence[EnvironmentReference],
    seed: int,
    steps: int,
    groups: int,
) -> Path:
    """Train a swarm without exchange; return its last policy."""
    swarm = RlSwarm(base, folder, tasks, steps, seed, groups)
    for _ in range(steps):
        swarm.train()
        swarm.publish()
    return swarm.policy


def compare(seed: int, plan: Plan) -> dict[str, dict[str, float]]:
    """Accuracies of each arm on both tasks."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = folder / "base"
        prepare_base(base, seed, BOTH)
        measured = Measured(base, plan.prompts)
        found = {"base": measured.of(base)}
        for task in TASKS:
            policy = alone(base, folder / task.name, [task], seed, plan.steps, plan.groups)
            found[f"alone, {task.name}"] = measured.of(policy)
        policies = trio.run(merged, base, folder / "merged", seed, plan, plan.steps // 2)
        found |= {name: measured.of(policy) for name, policy in policies.items()}
        policy = alone(base, folder / "mixture", TASKS, seed, 2 * plan.steps, plan.groups)
        found["mixture"] = measured.of(policy)
    print(f"seed {seed}: {time.process_time() - began:.0f} s", found, file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=at_least(1), default=5)
    parser.add_argument("--first-seed", type=at_least(0), default=0)
    parser.add_argument("--steps", type=at_least(2), default=60, help="of each swarm")
    parser.add_argument("--inner-steps", type=at_least(1), default=10)
    parser.add_argument("--groups", type=at_least(1), default=32, help="per step")
    parser.add_argument("--prompts", type=at_least(1), default=256, help="to measure on")
    parser.add_argument("--compression", choices=get_args(Compression), default="int8")
    parser.add_argument("--learning-rate", type=float, default=2.0, help="of the outer step")
    parser.add_argument("--momentum", type=float, default=0.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(
        given.steps,
        given.inner_steps,
        given.groups,
        given.prompts,
        given.compression,
        given.learning_rate,
        given.momentum,
    )
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    runs = [compare(seed, plan) for seed in seeds]
    print_json(
        {
            "steps": given.steps,
            "inner_steps": given.inner_steps,
            "arms": {
                arm: [spread(task, [run[arm][task] for run in runs]) for task in runs[0][arm]]
                for arm in runs[0]
            },
            "seeds": runs,
        }
    )


if __name__ == "__main__":
    main()
