"""On-policy distillation against fine-tuning on the teacher's samples, and against rewards alone:
`python -m benchmarks.studies distillation`.

The student is the demo's policy. The teacher is a larger model of its family, which learned the
task by supervised learning. Each way takes the same number of optimiser steps on as many
completions: the student's own, judged token by token by the teacher or by their rewards, or the
teacher's, each for another task. Accuracy is the mean probability of the right answer to held-out
tasks, which is what sampling has on average.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import spread
from benchmarks.groups import make_batch
from benchmarks.recipe import Sampler, train
from peers.demo.recipes import ENVIRONMENT, OBJECTIVE, OPTIMISER, SAMPLING, SCHEDULE, Warmup
from peers.demo.warmup import prepare_base, warm_up
from peers.engines.demo import EOS_ID
from peers.engines.loading import load
from peers.environments import Environment, Renderer, task_of
from peers.environments import load as load_environment
from peers.learning.descent import descend
from peers.learning.learner import Learner
from peers.learning.policy import TrainedPolicy, blank_model
from peers.learning.ranks import Ranks
from peers.learning.settings import LearnerSettings
from swarm.rollouts.seeds import digest

LARGER = {"hidden_size": 160, "intermediate_size": 480, "num_hidden_layers": 4}
"""The teacher's sizes: 1.3 million parameters."""

TEACHER = Warmup(learning_rate=1e-3, steps_max=1500, accuracy=0.97)
HELD_OUT = 2048
"""Tasks of which accuracy is the mean."""
POINTS = 4
"""How often a way's accuracy is measured."""


@dataclass(frozen=True)
class Way:
    """A way to learn."""

    weight: float = 0.0
    """Of the teacher in the advantages of the student's own tokens."""
    tunes: bool = False
    """Whether the student is fine-tuned on the teacher's samples instead."""
    rate: float = OPTIMISER.learning_rate

    def settings(self, teacher: Path, seed: int, steps: int) -> LearnerSettings:
        return LearnerSettings(
            replace(OBJECTIVE, teacher_weight=self.weight),
            replace(SCHEDULE, steps=steps),
            seed,
            optimiser=replace(OPTIMISER, learning_rate=self.rate),
            completion_tokens_max=SAMPLING.max_new_tokens,
            teacher=str(teacher),
        )


FAST = 2e-3
"""The rate of the demo's own supervised learning."""

WAYS = {
    "rewards alone": Way(),
    "on-policy": Way(1.0),
    "on-policy and rewards": Way(0.5),
    "on-policy, 2e-3": Way(1.0, rate=FAST),
    "fine-tuning": Way(tunes=True),
    "fine-tuning, 2e-3": Way(tunes=True, rate=FAST),
}


def make_teacher(folder: Path, base: Path, environment: Environment, seed: int) -> None:
    """Make the larger model, and teach it the task."""
    config = AutoConfig.from_pretrained(base)
    config.update({**LARGER, "layer_types": ["full_attention"] * LARGER["num_hidden_layers"]})
    torch.manual_seed(seed)
    shutil.copytree(base, folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    warm_up(folder, [environment], seed, TEACHER)


@torch.no_grad()
def accuracy(policy: Path, environment: Environment) -> float:
    """The mean probability of the right answer to the held-out tasks."""
    renderer, model = Renderer(policy), load(policy).eval()
    rows, begins = [], set()
    for index in range(HELD_OUT):
        task = task_of(
            environment, digest("swarm/1/held-out", index.to_bytes(8, "big")), "held_out"
        )
        prompt = renderer.encode_prompt(task.prompt)
        rows.append([*prompt, *renderer.encode_completion(task.answer), EOS_ID])
        begins.add(len(prompt))
    (begin,) = begins  # all tasks are of one length
    tokens = torch.tensor(rows)
    log_all = torch.log_softmax(model(tokens[:, :-1]).logits[:, begin - 1 :].float(), -1)
    right = log_all.gather(-1, tokens[:, begin:, None])[..., 0]
    return float(right.sum(-1).exp().mean())


def learn(
    way: Way, folder: Path, teacher: Path, environment: Environment, seed: int, steps: int
) -> float:
    """Train the policy in `folder`/0, and write policy k to `folder`/k; returns completion tokens
    that it learned from."""
    settings = way.settings(teacher, seed, steps)
    if way.tunes:
        return tune(folder, teacher, environment, settings)
    learner = Learner(folder / "0", settings)
    own = folder / "own"
    shutil.copytree(folder / "0", own / "0")
    sampler = Sampler(own / "0", [environment], SAMPLING, spread_only=not way.weight)
    name, schedule = "distillation", settings.schedule
    _, metrics = train(learner, sampler, own, seed, schedule, name=name, keep=folder)
    return sum(each["completions"] * each["completion_length"] for each in metrics)


def tune(folder: Path, teacher: Path, environment: Environment, settings: LearnerSettings) -> float:
    """Cross-entropy on samples of the teacher, as many in a step as there are completions in one of
    the others."""
    ranks, base = Ranks(), folder / "0"
    policy = TrainedPolicy(blank_model(base, settings, ranks), base, settings, ranks)
    sampler = Sampler(teacher, [environment], replace(SAMPLING, group_size=1))
    count, learned = SCHEDULE.groups_per_step * SAMPLING.group_size, 0
    for step in range(settings.schedule.steps):
        parts = (number.to_bytes(8, "big") for number in (settings.seed, step))
        batch = make_batch(sampler.sample(digest("swarm/1/tuning", *parts), 0, count)[0])
        learned += batch.token_count()
        policy.optimiser.zero_grad()
        total = torch.zeros(())
        for rows in policy.passes(batch):
            loss = -policy.scorer(rows, entropy=False)[0].sum() / batch.token_count()
            loss.backward()
            total += loss.detach()
        rate = settings.learning_rate(step)
        descend(policy, {"loss": total}, settings.optimiser.gradient_norm_max, rate)
        policy.write(folder / str(step + 1), policy.snapshot())
    return float(learned)


def study(
    seeds: Sequence[int], steps: int, ways: Mapping[str, Way], given: Path | None = None
) -> dict[str, Any]:
    """Accuracies of the student before and after, by way, and of the teacher: `given`, or one that
    is made."""
    environment = load_environment(ENVIRONMENT.name, ENVIRONMENT.version)
    measured = sorted({max(1, steps * point // POINTS) for point in range(1, POINTS + 1)})
    found: dict[str, list[list[float]]] = {label: [] for label in ("student", "teacher", *ways)}
    tokens: dict[str, list[float]] = {label: [] for label in ways}
    seconds = dict.fromkeys(ways, 0.0)

    def note(label: str, policies: Sequence[Path], seed: int) -> None:
        found[label].append([accuracy(policy, environment) for policy in policies])
        print(f"seed {seed}: {label} {found[label][-1]}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as name:
        made, base, folder = (Path(name) / each for each in ("teacher", "base", "student"))
        teacher = given or made
        for seed in seeds:
            prepare_base(base, seed)
            if not (given or made.exists()):
                make_teacher(made, base, environment, seed)
            if not found["teacher"]:
                note("teacher", [teacher], seed)
            note("student", [base], seed)
            for label, way in ways.items():
                began = time.process_time()
                shutil.copytree(base, folder / "0")
                tokens[label].append(learn(way, folder, teacher, environment, seed, steps))
                seconds[label] += time.process_time() - began
                note(label, [folder / str(at) for at in measured], seed)
                shutil.rmtree(folder)
            shutil.rmtree(base)
    return {
        "measured_after_steps": measured,
        "variants": {
            label: {
                **spread("accuracy", [each[-1] for each in curves], 4),
                **({"tokens": max(tokens[label])} if label in tokens else {}),
                **({"cpu_seconds": round(seconds[label] / len(seeds), 1)} if label in ways else {}),
                "curves": [[round(value, 4) for value in each] for each in curves],
            }
            for label, curves in found.items()
        },
    }
