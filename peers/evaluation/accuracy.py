"""A policy's accuracy on prompts that no training draws."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from peers.engines.engine import Engine
from peers.engines.episodes import play
from peers.engines.native import NativeEngine
from peers.environments import Environment, Renderer, task_of
from peers.environments.collection import Environments
from peers.environments.episodes import grade_segments, transcript_of
from peers.environments.interface import messages_of
from peers.evaluation.tasks import evaluation_seed, seeds_of_tasks
from swarm.jobs.evaluation import Answer, Evaluated
from swarm.rollouts.seeds import noise_key
from swarm.wire.manifest import EnvironmentReference, Sampling
from swarm.world.progress import report

BATCH = 128
"""Episodes generated at a time."""

ANSWERS_KEPT = 4
"""Answers of an evaluation that are kept for people to read."""


def mean_reward(
    engine: Engine,
    environment: Environment,
    tokenizer_folder: Path,
    sampling: Sampling,
    *,
    prompts: int,
    greedy: bool = False,
    answers: list[Answer] | None = None,
) -> float:
    """Mean reward in [0, 1] over `prompts` held-out tasks, one episode each.

    Two policies answer the same ones. The first `ANSWERS_KEPT` answers are added to `answers`.
    """
    drawn = evaluation_seed("held_out")
    key = None if greedy else noise_key(drawn)
    seeds = islice(seeds_of_tasks(drawn), prompts)
    tasks = [task_of(environment, seed, "held_out") for seed in seeds]
    renderer, stops, total = Renderer(tokenizer_folder), sampling.stop_ids, 0.0
    for start in range(0, prompts, BATCH):
        batch = tasks[start : start + BATCH]
        work, rows = [(environment, task) for task in batch], range(start, start + len(batch))
        played = play(engine, renderer, work, rows, key, sampling)
        for task, rollout in zip(batch, played.rollouts, strict=True):
            segments = rollout.segments
            reward = grade_segments(environment, task, renderer, segments, stops).reward
            total += reward
            if answers is not None and len(answers) < ANSWERS_KEPT:
                turns = transcript_of(renderer, segments, stops).turns
                written = [turn.text for turn in turns if turn.kind == "model"]
                question = messages_of(task.prompt)[-1].content
                answers.append(Answer(question, " ⏎ ".join(written), reward))
        report()
    return total / prompts


@torch.inference_mode()
def evaluate(
    folder: Path,
    prompts: int,
    environments: Environments,
    references: Sequence[EnvironmentReference],
    sampling: Sampling,
) -> Evaluated:
    """The accuracies, sampled and greedy, of a policy on held-out tasks of every environment with a
    positive weight."""
    total = sum(reference.weight for reference in references)
    engine, sampled, greedy, answers = NativeEngine(folder), 0.0, 0.0, list[Answer]()
    for reference in references:
        if reference.weight:
            measure = partial(
                mean_reward,
                engine,
                environments.of(reference),
                folder,
                sampling,
                prompts=prompts,
            )
            sampled += reference.weight / total * measure(answers=answers)
            greedy += reference.weight / total * measure(greedy=True)
    return Evaluated(sampled=sampled, greedy=greedy, answers=answers)
