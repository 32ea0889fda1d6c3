"""The demo's base policy: random weights, then the supervised learning that RL needs to begin.

It stops early, at a sampled accuracy of about 0.2. That gives RL enough rewards to learn from, and
leaves most of the task to learn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from peers.demo.recipes import RECIPES, Recipe
from peers.engines import model as policy_model
from peers.engines.demo import EOS_ID, make_policy
from peers.environments import Environment, Renderer, task_of
from peers.environments.collection import Environments
from peers.environments.episodes import demonstrate
from peers.evaluation.accuracy import evaluate
from peers.trainer.child import EVALUATION_PROMPTS
from swarm.jobs.training import BasePrepared, Evaluate
from swarm.rollouts.seeds import digest, environment_of_group
from swarm.world.progress import report


@dataclass(frozen=True)
class Warmup:
    """The recipe, found by measuring: 51 to 53 steps, about 4 s on one core."""

    learning_rate: float = 2e-3
    warmup_steps: int = 20
    batch: int = 128
    """Prompts per step; no prompt is drawn twice."""
    steps_max: int = 200
    accuracy: float = 0.15
    """Probability of the right answer at which to stop, mean over the prompts of the last `window`
    steps. Five seeds then have 0.205 to 0.223 on 4,096 held-out prompts."""
    window: int = 4
    weights: Sequence[float] = (1.0,)
    """Share of each environment among the prompts, relative to the sum."""


def prepare_base(folder: Path, seed: int, recipe: Recipe = RECIPES["sort-digits"]) -> BasePrepared:
    """Make a demo's base policy in `folder`, and measure it on held-out prompts."""
    environments = Environments(recipe.environments)
    make_policy(folder, seed, recipe.positions)
    steps = warm_up(
        folder,
        [environments.of(reference) for reference in recipe.environments],
        seed,
        Warmup(
            batch=recipe.warmup_batch,
            steps_max=recipe.warmup_steps_max,
            accuracy=recipe.accuracy,
            weights=[reference.weight for reference in recipe.environments],
        ),
    )
    job = Evaluate(folder=str(folder), prompts=EVALUATION_PROMPTS, split="held_out")
    found = evaluate(job, environments, recipe.environments, recipe.sampling)
    return BasePrepared(sft_steps=steps, sampled=found.sampled, greedy=found.greedy)


def warm_up(
    folder: Path, environments: Sequence[Environment], seed: int, recipe: Warmup | None = None
) -> int:
    """Train the policy in `folder`, in place, on episodes with full reward; return the steps.

    A step's loss also gives the probability of its prompts' answers before the step learned them.
    That is the expected accuracy of sampling at temperature 1, so the stopping rule needs no
    generation and has none of its noise.
    """
    recipe = recipe or Warmup()
    renderer = Renderer(folder)
    model: Any = policy_model.load(folder).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, fused=True)
    recent: deque[float] = deque(maxlen=recipe.window)
    for step in range(recipe.steps_max):
        report()
        optimiser.param_groups[0]["lr"] = recipe.learning_rate * min(
            1.0, (step + 1) / recipe.warmup_steps
        )
        tokens, labels = _batch(environments, renderer, seed, step, recipe)
        logits = model(tokens[:, :-1], use_cache=False).logits  # [batch, seq - 1, vocabulary]
        targets = labels[:, 1:]
        surprise = functional.cross_entropy(
            logits.transpose(1, 2), targets, ignore_index=-100, reduction="none"
        )  # [batch, seq - 1]
        optimiser.zero_grad()
        loss = surprise.sum() / (targets >= 0).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        recent.append(surprise.detach().sum(-1).neg().exp().mean().item())
        if len(recent) == recipe.window and sum(recent) / recipe.window >= recipe.accuracy:
            break
    policy_model.save(model, folder, tokenizer_from=folder)
    return step + 1


def _batch(
    environments: Sequence[Environment], renderer: Renderer, seed: int, step: int, recipe: Warmup
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, labels), int64 [batch, seq], of whole episodes. Labels without loss are −100."""
    rows, labels = [], []
    for index in range(recipe.batch):
        parts = seed.to_bytes(8, "big"), (step * recipe.batch + index).to_bytes(8, "big")
        drawn = digest("swarm/1/sft", *parts)
        environment = environments[environment_of_group(drawn, 0, recipe.weights)]
        segments = demonstrate(environment, task_of(environment, drawn), renderer, EOS_ID)
        rows.append(torch.tensor([token for segment in segments for token in segment.tokens]))
        labels.append(
            torch.tensor(
                [
                    token if segment.kind == "model" else -100
                    for segment in segments
                    for token in segment.tokens
                ]
            )
        )
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad(labels, batch_first=True, padding_value=-100)
