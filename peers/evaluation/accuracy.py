"""Playing tasks for their grades, and a policy's accuracy on prompts that no training draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch

from peers.engines.engine import Engine
from peers.engines.episodes import play
from peers.engines.native import NativeEngine
from peers.environments import Environment, Grade, Renderer, Task, Transcript, grade, task_of
from peers.environments.collection import Environments, labels
from peers.environments.episodes import transcript_of
from peers.environments.interface import NotGradable, Split
from peers.evaluation.tasks import evaluation_seed, seeds_of_tasks
from swarm.jobs.training import Accuracy, Evaluate, Evaluated
from swarm.rollouts.seeds import noise_key
from swarm.wire.manifest import EnvironmentReference, Sampling

BATCH = 128
"""Episodes generated at a time."""


def graded(
    engine: Engine,
    renderer: Renderer,
    environment: Environment,
    tasks: Sequence[Task],
    first_row: int,
    key: tuple[int, int] | None,
    sampling: Sampling,
) -> Iterator[tuple[Transcript, Grade | NotGradable]]:
    """Play one episode per task, in batches, and grade it if that is possible.

    Rows count from `first_row`.
    """
    for start in range(0, len(tasks), BATCH):
        batch = tasks[start : start + BATCH]
        rows = range(first_row + start, first_row + start + len(batch))
        work = [(environment, task) for task in batch]
        played = play(engine, renderer, work, rows, key, sampling)
        for task, rollout in zip(batch, played.rollouts, strict=True):
            transcript = transcript_of(renderer, rollout.segments, sampling.stop_ids)
            try:
                found: Grade | NotGradable = grade(environment, task, transcript)
            except NotGradable as error:
                found = error
            yield transcript, found


def mean_reward(
    engine: Engine,
    environment: Environment,
    tokenizer_folder: Path,
    sampling: Sampling,
    *,
    prompts: int,
    split: Split = "held_out",
    greedy: bool = False,
) -> float:
    """Mean reward in [0, 1] over `prompts` tasks of a split, one episode each.

    The tasks depend on the split only, so two policies answer the same ones.
    """
    drawn = evaluation_seed(split)
    key = None if greedy else noise_key(drawn)
    tasks = [task_of(environment, seed, split) for seed in islice(seeds_of_tasks(drawn), prompts)]
    renderer = Renderer(tokenizer_folder)
    played = graded(engine, renderer, environment, tasks, 0, key, sampling)
    total = 0.0
    for _, found in played:
        if isinstance(found, NotGradable):
            raise found
        total += found.reward
    return total / prompts


@torch.inference_mode()
def accuracy(
    folder: Path, environment: Environment, sampling: Sampling, prompts: int, split: Split
) -> Accuracy:
    """Sampled and greedy accuracy of the policy in a Hugging Face folder."""
    engine = NativeEngine(folder)
    sampled, greedy = (
        mean_reward(
            engine, environment, folder, sampling, prompts=prompts, split=split, greedy=greedily
        )
        for greedily in (False, True)
    )
    return Accuracy(sampled=sampled, greedy=greedy)


def evaluate(
    job: Evaluate,
    environments: Environments,
    references: Sequence[EnvironmentReference],
    sampling: Sampling,
) -> Evaluated:
    """The accuracies of a policy in every environment with a positive weight."""
    total = sum(reference.weight for reference in references)
    found: dict[str, Accuracy] = {}
    sampled = greedy = 0.0
    for label, reference in zip(labels(references), references, strict=True):
        if reference.weight:
            environment = environments.of(reference)
            found[label] = each = accuracy(
                Path(job.folder), environment, sampling, job.prompts, job.split
            )
            sampled += reference.weight / total * each.sampled
            greedy += reference.weight / total * each.greedy
    return Evaluated(sampled=sampled, greedy=greedy, environments=found)
