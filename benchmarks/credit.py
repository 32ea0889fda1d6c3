"""Credit for whole answers against credit for single tokens, by PRIME and by VinePPO.

    python -m benchmarks.credit --seeds 3 --steps 60
    python -m benchmarks.credit --seeds 3 --steps 360 --only outcomes

Sums that are written out step by step, in 97 tokens: an early mistake runs through to the end. The
demo's model, warmed up on the task's own answers, takes on-policy steps of 16 groups of 8 answers
at a constant rate. Prints one JSON object: for each variant, by seed, the mean reward of every ten
steps and the tokens generated until then, those of continuations included. No task occurs twice.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.common import at_least
from benchmarks.groups import Group
from benchmarks.recipe import Sampler, train
from peers.demo.recipes import OBJECTIVE, OPTIMISER, SAMPLING, Warmup
from peers.demo.warmup import warm_up
from peers.engines.demo import VOCABULARY, make_policy
from peers.engines.episodes import ContinuedTask, play
from peers.environments import Generated, Renderer, SingleTurn, Task, Transcript, task_of
from peers.environments.episodes import grade_segments
from peers.environments.interface import Tasks
from peers.learning.batch import AcceptedGroups
from peers.learning.learner import Learner
from peers.learning.settings import LearnerSettings
from peers.learning.values import give_values
from peers.trainer.state_values import boundaries
from swarm.jobs.training import StateValue
from swarm.rollouts.continuations import whole
from swarm.rollouts.seeds import digest, noise_key, task_seed
from swarm.terminal.output import print_json
from swarm.wire.manifest import ProcessRewards, Schedule, Values

TERMS, STEPS = 16, 10
LENGTH = 6 * TERMS + 1
"""Tokens of an answer, its end included."""
SAMPLED = replace(SAMPLING, max_new_tokens=LENGTH)
CONSTANT = replace(OPTIMISER, learning_rate=1e-4, final_learning_rate_share=1.0)
"""At the demo's rate of 6e-4 the rewards are gone within 30 steps."""
STATES = Values(segment_tokens=24, boundary_ids=[VOCABULARY.index(";")])
"""A state follows every fourth step of the sum."""
RLOO = replace(OBJECTIVE, advantage="rloo")
PROCESS = ProcessRewards(weight=1.0, learning_rate=1.2e-3)
VARIANTS = {
    "outcomes": RLOO,
    "outcomes, grpo": OBJECTIVE,
    "process rewards, 0.05": replace(RLOO, process=replace(PROCESS, beta=0.05)),
    "process rewards, 0.5": replace(RLOO, process=replace(PROCESS, beta=0.5)),
    "process rewards, slow": replace(RLOO, process=replace(PROCESS, learning_rate=1e-4)),
    "continuations": RLOO,
}


class Sums(SingleTurn):
    """`a7b5c8>` asks for `a7=07;b5=12;c8=20;`, modulo 100."""

    name, version = "sums", "1"

    def tasks(self) -> Tasks:
        return Generated(self._make)

    def grade(self, task: Task, transcript: Transcript) -> float:
        """1.0 if the last sum is right."""
        return float(transcript.finished and transcript.text[-4:] == task.answer[-4:])

    @staticmethod
    def _make(randomness: bytes) -> Task:
        digits = f"{int.from_bytes(randomness, 'big') % 10**TERMS:0{TERMS}d}"
        terms = [a + b for a, b in zip(string.ascii_lowercase, digits, strict=False)]
        sums = accumulate(map(int, digits))
        steps = [f"{term}={total % 100:02d};" for term, total in zip(terms, sums, strict=True)]
        return Task(prompt="".join(terms) + ">", answer="".join(steps))


@dataclass
class Judge:
    """Counts tokens, and gives answers the values of their states, from continuations by the policy
    that wrote them; none if `count` is 0."""

    sampler: Sampler
    renderer: Renderer
    count: int
    tokens: list[int] = field(default_factory=list)
    """Generated in each step."""

    def __call__(
        self, drawn: bytes, groups: Sequence[Group], accepted: Sequence[AcceptedGroups]
    ) -> None:
        size = SAMPLED.group_size
        answers = [rollout.model_tokens for group in groups for rollout in group.rollouts]
        states = [
            (row, ContinuedTask(task_of(Sums(), task_seed(drawn, row // size)), answer[:position]))
            for row, answer in enumerate(answers)
            if self.count and groups[row // size].kept
            for position in boundaries(answer, STATES)
        ]
        work = [state for _, state in states for _ in range(self.count)]
        key = noise_key(digest("swarm/1/credit", drawn))
        played = play(self.sampler.engine, self.renderer, work, range(len(work)), key, SAMPLED)
        rewards = []
        for state, rollout in zip(work, played.rollouts, strict=True):
            segments = whole(rollout, len(state.prefix)).segments
            stops = SAMPLED.stop_ids
            rewards.append(
                grade_segments(Sums(), state.task, self.renderer, segments, stops).reward
            )
        values = [
            StateValue(
                row, len(state.prefix), statistics.fmean(rewards[first : first + self.count])
            )
            for first, (row, state) in zip(
                range(0, len(work), self.count or 1), states, strict=True
            )
        ]
        for each in accepted:
            give_values(each, values, RLOO)
        made = [*answers, *(each.model_tokens for each in played.rollouts)]
        self.tokens.append(sum(map(len, made)))


def learn(base: Path, seed: int, name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Train from the policy in `base`; figures of every ten steps."""
    schedule = Schedule(steps=given.steps, groups_per_step=16, asynchrony=0)
    settings = LearnerSettings(VARIANTS[name], schedule, seed, CONSTANT, LENGTH)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as here:
        folder = Path(here)
        shutil.copytree(base, folder / "0")
        learner = Learner(folder / "0", settings)
        sampler = Sampler(folder / "0", [Sums()], SAMPLED, spread_only=True)
        judge = Judge(sampler, Renderer(base), given.continuations * (name == "continuations"))
        rewards, metrics = train(learner, sampler, folder, seed, schedule, judge=judge)
    tens = [slice(start, start + STEPS) for start in range(0, given.steps, STEPS)]
    told = [each.get("process_accuracy", 0.0) for each in metrics]
    return {
        "seed": seed,
        "reward": [round(statistics.fmean(rewards[ten]), 4) for ten in tens],
        "tokens": [sum(judge.tokens[: ten.stop]) for ten in tens],
        "process_accuracy": [round(statistics.fmean(told[ten]), 3) for ten in tens],
        "cpu_seconds": round(time.process_time() - began),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=at_least(1), default=3, help="how many seeds")
    parser.add_argument("--first-seed", type=at_least(0), default=0)
    parser.add_argument("--steps", type=at_least(1), default=60)
    parser.add_argument("--continuations", type=at_least(1), default=4, help="of a state")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in given.only}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            base = Path(folder) / str(seed)
            make_policy(base, seed, positions=2 * LENGTH)
            warm_up(base, [Sums()], seed, Warmup(batch=64, steps_max=1000, accuracy=0.25))
            for name, found in runs.items():
                found.append(learn(base, seed, name, given))
                print(name, found[-1], file=sys.stderr, flush=True)
    print_json({**vars(given), "runs": runs})


if __name__ == "__main__":
    main()
