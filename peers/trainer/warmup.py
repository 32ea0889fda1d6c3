"""The demo's base policy: random weights, then the supervised learning that RL needs to begin.

It stops early, at a sampled accuracy of about 0.2. That gives RL enough rewards to learn from, and
leaves most of the task to learn.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from peers.demo import ENVIRONMENT, SAMPLING
from peers.engines import model as policy_model
from peers.engines.demo import EOS_ID, make_policy
from peers.environments import Environment, Renderer, task_of
from peers.environments import load as load_environment
from peers.trainer.child import EVALUATION_PROMPTS
from peers.trainer.evaluation import accuracy
from swarm.jobs.training import BasePrepared
from swarm.rollouts.seeds import digest
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


def prepare_base(folder: Path, seed: int) -> BasePrepared:
    """Make the demo's base policy in `folder`, and measure it on held-out prompts."""
    environment = load_environment(ENVIRONMENT.name, ENVIRONMENT.version)
    make_policy(folder, seed)
    steps = warm_up(folder, environment, seed)
    found = accuracy(folder, environment, SAMPLING, EVALUATION_PROMPTS, "held_out")
    return BasePrepared(sft_steps=steps, sampled=found.sampled, greedy=found.greedy)


def warm_up(folder: Path, environment: Environment, seed: int, recipe: Warmup | None = None) -> int:
    """Train the policy in `folder`, in place, on answers to training prompts; return the steps.

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
        tokens, labels = _batch(environment, renderer, seed, step, recipe.batch)
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
    environment: Environment, renderer: Renderer, seed: int, step: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, labels), int64 [batch, seq]: prompt, answer, end. Labels without loss are −100."""
    rows, labels = [], []
    for index in range(size):
        drawn = seed.to_bytes(8, "big"), (step * size + index).to_bytes(8, "big")
        task = task_of(environment, digest("swarm/1/sft", *drawn))
        prompt = renderer.encode_prompt(task.prompt)
        answer = [*renderer.encode_completion(task.answer), EOS_ID]
        rows.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([-100] * len(prompt) + answer))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad(labels, batch_first=True, padding_value=-100)
