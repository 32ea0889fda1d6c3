"""Evaluation of a policy's accuracy, on prompts that neither SFT nor RL ever draws."""

from __future__ import annotations

from pathlib import Path

import torch

from peers.engines.engine import Engine
from peers.engines.episodes import play
from peers.engines.native import NativeEngine
from peers.environments import Environment, Renderer, task_of
from peers.environments.base import Split
from peers.environments.episodes import grade_segments
from swarm.jobs import Accuracy
from swarm.messages import Sampling
from swarm.rollouts.seeds import digest, noise_key

BATCH = 128
"""Episodes generated at a time."""


def mean_reward(
    engine: Engine,
    environment: Environment,
    tokenizer_folder: Path,
    sampling: Sampling,
    *,
    prompts: int,
    split: Split = "held_out",
    seed: int = 0,
    greedy: bool = False,
) -> float:
    """Mean reward in [0, 1] over `prompts` tasks of a split, one episode each.

    The tasks depend on `seed` and the split only, so two policies answer the same ones.
    """
    renderer = Renderer(tokenizer_folder)
    drawn = digest("swarm/1/evaluation", seed.to_bytes(8, "big"), split.encode())
    key = None if greedy else noise_key(drawn)
    tasks = [
        task_of(
            environment, digest("swarm/1/evaluation-task", drawn, index.to_bytes(4, "big")), split
        )
        for index in range(prompts)
    ]
    total = 0.0
    for start in range(0, prompts, BATCH):
        batch = tasks[start : start + BATCH]
        rows = range(start, start + len(batch))
        played = play(
            engine, renderer, [(environment, task) for task in batch], rows, key, sampling
        )
        for task, rollout in zip(batch, played.rollouts, strict=True):
            total += grade_segments(
                environment, task, renderer, rollout.segments, sampling.stop_ids
            )
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
