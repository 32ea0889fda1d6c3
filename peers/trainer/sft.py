"""The demo's warm-up: a little supervised learning, so that RL has something to build on.

It stops early, at a sampled accuracy of 0.15: enough rewards to learn from, most of the task left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from peers.environments import Environment, Renderer
from peers.policy import model as policy_model
from peers.policy.demo import EOS_ID
from peers.policy.native import NativeEngine
from peers.trainer.evaluation import mean_reward
from swarm.messages import Sampling
from swarm.seeds import digest


@dataclass(frozen=True)
class Warmup:
    """The recipe, found by measuring: 50 to 60 steps, about 4 s on one core."""

    learning_rate: float = 2e-3
    warmup_steps: int = 20
    batch: int = 128
    """Prompts a step."""
    steps_max: int = 200
    check_from: int = 40
    """First step after which accuracy is measured; it is 0 before."""
    check_every: int = 4
    check_prompts: int = 256
    accuracy: float = 0.15
    """Sampled accuracy on training prompts at which to stop."""


def warm_up(
    folder: Path,
    environment: Environment,
    sampling: Sampling,
    seed: int,
    recipe: Warmup | None = None,
    progress: Callable[[int, float, float], None] = lambda _step, _loss, _accuracy: None,
) -> int:
    """Train the policy in `folder` on answers to training prompts, in place; the steps taken.

    `progress(step, loss, accuracy)` is called at every measurement.
    """
    recipe = recipe or Warmup()
    renderer = Renderer(folder)
    model: Any = policy_model.load(folder).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, fused=True)
    engine: NativeEngine | None = None
    for step in range(recipe.steps_max):
        optimiser.param_groups[0]["lr"] = recipe.learning_rate * min(
            1.0, (step + 1) / recipe.warmup_steps
        )
        tokens, labels = _batch(environment, renderer, seed, step, recipe.batch)
        logits = model(tokens[:, :-1], use_cache=False).logits  # [batch, seq - 1, vocabulary]
        loss = functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        taken = step + 1
        if taken >= recipe.check_from and (taken - recipe.check_from) % recipe.check_every == 0:
            policy_model.save(model, folder, tokenizer_from=folder)
            if engine is None:
                engine = NativeEngine(folder)
            else:
                engine.load_weights(folder)
            accuracy = mean_reward(
                engine,
                environment,
                folder,
                sampling,
                prompts=recipe.check_prompts,
                split="train",
                seed=seed,
            )
            progress(taken, loss.item(), accuracy)
            if accuracy >= recipe.accuracy:
                break
    policy_model.save(model, folder, tokenizer_from=folder)
    return taken


def _batch(
    environment: Environment, renderer: Renderer, seed: int, step: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, labels), int64 [batch, seq]: prompt, answer, end; labels −100 where no loss is."""
    rows, labels = [], []
    for index in range(size):
        task = environment.task(
            digest("swarm/1/sft", seed.to_bytes(8, "big"), (step * size + index).to_bytes(8, "big"))
        )
        prompt = renderer.encode_prompt(task.prompt)
        answer = [*renderer.encode_completion(task.answer), EOS_ID]
        rows.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([-100] * len(prompt) + answer))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad(labels, batch_first=True, padding_value=-100)
