"""A teacher's solutions before RL: how many RL steps do they save?

    python -m benchmarks.teacher --seeds 5 > teacher.json
    python -m benchmarks.study_plot teacher.json teacher.png --ylabel accuracy

A teacher learns to sort digits by RL. `swarm synthesize` draws its solutions of training tasks and
keeps the correct ones. For each seed the demo's weak base then learns in two ways, each until it
reaches the target accuracy: by RL alone with the demo's recipe, and by `swarm sft` on the
solutions, followed by RL with a smaller learning rate. Prints one JSON object: accuracies on 512
held-out prompts, and the RL steps of each way. The steps of the teacher's own RL are not counted.
Nothing here uses a network.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from msgspec.structs import replace

from benchmarks.arguments import at_least
from benchmarks.commands import accuracy, swarm
from benchmarks.study import Variant, band, learn
from peers.demo.recipes import ENVIRONMENT, OPTIMISER
from peers.environments import load as load_environment
from peers.evaluation.tasks import different_tasks
from peers.trainer.child import EVALUATION_PROMPTS
from peers.trainer.warmup import prepare_base
from swarm.terminal.output import print_json

TEACHER_SEED = 1000


@dataclass
class Climb:
    """Sampled accuracy on held-out prompts before RL and during it, until it reaches a target."""

    every: int
    """Steps between two measurements."""
    target: float
    accuracy: list[float] = field(default_factory=list)

    def look(self, step: int, folder: Path) -> bool:
        """Measure a policy if it is its turn; return whether the target is reached."""
        if step % self.every == 0:
            self.accuracy.append(accuracy(folder))
        return self.accuracy[-1] >= self.target

    @property
    def steps(self) -> int | None:
        """RL steps until the target; None: it was not reached."""
        reached = self.accuracy[-1] >= self.target
        return self.every * (len(self.accuracy) - 1) if reached else None


def train_teacher(folder: Path, steps: int) -> None:
    """Train the teacher by RL, from a base of its own, into `folder`."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        prepare_base(base, TEACHER_SEED)

        def keep(step: int, policy: Path) -> bool:
            if step == steps:
                shutil.copytree(policy, folder)
            return False

        learn(base, TEACHER_SEED, Variant(steps=steps), watch=keep)


def held_out_prompts(traces: Path) -> int:
    """How many rows of a data set have a prompt that measures the policies."""
    environment = load_environment(ENVIRONMENT.name, ENVIRONMENT.version)
    measured = {
        str(task.prompt) for task in different_tasks(environment, "held_out", 0, EVALUATION_PROMPTS)
    }
    return sum(
        prompt in measured for prompt in pq.read_table(traces / "data")["prompt"].to_pylist()
    )


def reinforce(base: Path, seed: int, learning_rate: float, given: argparse.Namespace) -> Climb:
    """RL from a policy, until it reaches the target."""
    variant = Variant(steps=given.steps, optimiser=replace(OPTIMISER, learning_rate=learning_rate))
    climb = Climb(given.every, given.target)
    if not climb.look(0, base):
        learn(base, seed, variant, watch=climb.look)
    return climb


def compare(seed: int, traces: Path, given: argparse.Namespace) -> dict[str, Climb]:
    """RL of one seed's base, alone and after SFT on the traces."""
    with tempfile.TemporaryDirectory() as name:
        base, student = Path(name) / "base", Path(name) / "student"
        prepare_base(base, seed)
        tuned = ["--model", base, "--data", traces, "--out", student, "--seed", seed]
        tuned += ["--steps", given.sft_steps, "--batch", 64, "--learning-rate", 1e-3]
        swarm("sft", *tuned, "--report-every", given.sft_steps)
        found = {
            "sft then rl": reinforce(student, seed, given.learning_rate, given),
            "rl alone": reinforce(base, seed, OPTIMISER.learning_rate, given),
        }
    steps = {arm: climb.steps for arm, climb in found.items()}
    print(f"seed {seed}: RL steps to the target {steps}", file=sys.stderr, flush=True)
    return found


def summary(climbs: Sequence[Climb]) -> dict[str, Any]:
    """Figures of one way over its seeds. In its curve a seed that has arrived waits."""
    longest = max(len(climb.accuracy) for climb in climbs)
    waiting = [
        climb.accuracy + climb.accuracy[-1:] * (longest - len(climb.accuracy)) for climb in climbs
    ]
    curve = band(waiting, points=longest)
    curve["step"] = [place * climbs[0].every for place in curve["step"]]
    steps = [climb.steps for climb in climbs]
    median = statistics.median(math.inf if each is None else each for each in steps)
    return {
        "accuracy_before_rl": [round(climb.accuracy[0], 4) for climb in climbs],
        "rl_steps": steps,
        "rl_steps_median": None if math.isinf(median) else median,
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    whole = at_least(1)
    parser.add_argument("--seeds", type=whole, default=5, help="how many students")
    parser.add_argument("--target", type=float, default=0.8, help="accuracy to reach")
    parser.add_argument("--steps", type=whole, default=250, help="most RL steps")
    parser.add_argument("--every", type=whole, default=5, help="steps between two measurements")
    parser.add_argument("--teacher", type=Path, help="policy to use, instead of training one")
    parser.add_argument("--teacher-steps", type=whole, default=400, help="of the teacher's RL")
    parser.add_argument("--tasks", type=whole, default=2048, help="training tasks to solve")
    parser.add_argument("--sft-steps", type=whole, default=100, help="of 64 traces each")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="of RL after SFT")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        teacher, traces = given.teacher or Path(name) / "teacher", Path(name) / "traces"
        if given.teacher is None:
            train_teacher(teacher, given.teacher_steps)
        asked = ["--tasks", ENVIRONMENT.name, "--limit", given.tasks, "--samples", 1]
        asked += ["--max-new-tokens", 8, "--out", traces]
        made = swarm("synthesize", "--teacher", teacher, *asked)[-1]
        runs = [compare(seed, traces, given) for seed in range(given.seeds)]
        arms = {arm: summary([run[arm] for run in runs]) for arm in runs[0]}
        print_json(
            {
                "teacher_accuracy": round(accuracy(teacher), 4),
                "solutions": made["solutions"],
                "traces": made["kept"],
                "held_out_prompts_among_traces": held_out_prompts(traces),
                "sft_steps": given.sft_steps,
                "learning_rate_after_sft": given.learning_rate,
                "target": given.target,
                "accuracy": arms,
                "cpu_seconds_of_rl": round(time.process_time() - began),
            }
        )


if __name__ == "__main__":
    main()
