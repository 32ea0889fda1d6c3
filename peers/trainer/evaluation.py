"""How often a policy is right, on prompts that neither SFT nor RL ever draws."""

from __future__ import annotations

from pathlib import Path

from peers.environments import Environment, Renderer, grade, task_of
from peers.environments.base import Split
from peers.policy.engine import Engine
from swarm.messages import Sampling
from swarm.rollouts.seeds import digest, noise_key

BATCH = 128
"""Completions generated at a time."""


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
    """Mean reward in [0, 1] over `prompts` tasks of a split, one completion each.

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
        made = engine.generate(
            [renderer.encode_prompt(task.prompt) for task in batch],
            range(start, start + len(batch)),
            key,
            sampling.temperature,
            sampling.stop_ids,
            sampling.max_new_tokens,
        )
        for task, tokens in zip(batch, made.tokens, strict=True):
            text, finished = renderer.decode_completion(tokens, sampling.stop_ids)
            total += grade(environment, task, text, finished)
    return total / prompts
