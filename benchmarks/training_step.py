"""One full GRPO step of the trainer on a GPU, with every attention that packed rows can have.

`python -m benchmarks.accelerator --parts train` runs it. Tokens are packed into as few rows as
possible (16,384 tokens each). Prompts have 16 tokens; completions are log-uniform between 16 tokens
and an eighth of all tokens, and fill the batch exactly. A step is the same as in
`benchmarks.trainer`: log μ under the generating policy (μ ≠ π), forward, backward, gradient
clipping, AdamW; bf16 with fp32 master weights unless the dtype is fp32. The first step compiles
kernels and is not measured.

Each attention has these figures: `tokens_per_second` and `model_flops_share` (MFU) as the trainer
reports them for the median step (the pass for log μ takes time, but does not count as useful work),
`seconds_per_step` with the least and the most, `peak_bytes` of tensors (weights, gradients,
optimiser and older policies), `speedup_over_sdpa`, and `loss` and `gradient_norm`, which must agree
except for rounding. An attention that is unavailable or fails has `reason` instead.
"""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import MODELS, make_policy
from benchmarks.trainer import (
    CHANGE,
    GROUP_SIZE,
    OBJECTIVE,
    OPTIMISER,
    PROMPT_TOKENS,
    Meter,
    repeat_step,
)
from peers.engines.model import count_parameters
from peers.trainer import metrics
from peers.trainer.learning.groups import Group
from peers.trainer.learning.learner import Learner
from peers.trainer.learning.masks import why_not
from peers.trainer.learning.ranks import Ranks
from peers.trainer.learning.settings import LearnerSettings
from peers.trainer.learning.sharding import local
from swarm.jobs.training import Sharding
from swarm.manifest import Schedule
from swarm.rollouts.rollout import Rollout

SHORTEST = 16
TOKENS_MIN = 512
"""Fewest input tokens that can hold a group of such completions."""


def make_groups(tokens: int, vocabulary: int) -> list[Group]:
    """Make groups with `tokens` inputs in total (all but the last token of each sequence)."""
    longest = tokens // 8
    mean = (longest - SHORTEST) / math.log(longest / SHORTEST)
    prompt_inputs = PROMPT_TOKENS - 1
    count = GROUP_SIZE * max(1, round(tokens / (mean + prompt_inputs) / GROUP_SIZE))
    generator = torch.Generator().manual_seed(1)
    places = (torch.randperm(count, generator=generator) + 0.5) / count
    lengths = SHORTEST * (longest / SHORTEST) ** places
    wanted = tokens - count * prompt_inputs
    cut = (lengths * (wanted / lengths.sum())).int().clamp(min=1).tolist()
    cut[cut.index(max(cut))] += wanted - sum(cut)

    def draw(length: int) -> list[int]:
        return torch.randint(vocabulary, (length,), generator=generator).tolist()

    groups = []
    for start in range(0, count, GROUP_SIZE):
        prompt = draw(PROMPT_TOKENS)
        rollouts = [
            Rollout.single_turn(prompt, draw(length)) for length in cut[start : start + GROUP_SIZE]
        ]
        groups.append(Group(rollouts, torch.rand(GROUP_SIZE, generator=generator).tolist(), 0))
    return groups


@torch.no_grad()
def move_on(model: Any) -> None:
    """Turn μ into π by noise on the weights, the same in every call."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            part = local(parameter)
            part.add_(torch.randn_like(part) * (part.std() * CHANGE))


def measure(
    base: Path, groups: list[Group], settings: LearnerSettings, device: str, steps: int, peak: float
) -> dict[str, float]:
    """Measure one attention; `peak` in FLOP/s, 0 if unknown."""
    gc.collect()  # free the previous attention's tensors
    if device == "cuda":
        torch.cuda.empty_cache()
    meter = Meter(device)
    learner = Learner(base, settings, ranks=Ranks(device=torch.device(device)))
    move_on(learner.model)
    repeat_step(learner, groups, 1, meter)
    meter.seconds.clear()
    found = repeat_step(learner, groups, steps, meter)
    figures = meter.figures()
    return {
        **metrics.speed(found, figures["seconds_per_step"], peak),
        **figures,
        "loss": found["loss"],
        "gradient_norm": found["gradient_norm"],
        "parameters": count_parameters(learner.model),
    }


def try_attention(
    attention: str, base: Path, groups: list[Group], given: argparse.Namespace, peak: float
) -> dict[str, Any]:
    """Figures of an attention, or the reason why there are none."""
    half = given.dtype == "bfloat16"
    reason = why_not(attention, torch.device(given.device), half)
    if reason:
        return {"reason": reason}
    settings = LearnerSettings(
        OBJECTIVE,
        Schedule(steps=100, groups_per_step=len(groups), max_staleness=2),
        optimiser=OPTIMISER,
        sharding=Sharding(
            mixed_precision=half, activation_checkpointing=given.activation_checkpointing
        ),
        attention=attention,
        flat=True,
    )
    try:
        return measure(base, groups, settings, given.device, given.steps, peak)
    except (RuntimeError, ImportError) as error:
        first = str(error).partition("\n")[0]
        short = isinstance(error, torch.OutOfMemoryError)
        what = "the device's memory does not suffice" if short else type(error).__name__
        return {"reason": f"{what}: {first}"}


def compare(name: str, given: argparse.Namespace, peak: float) -> dict[str, Any]:
    """Compare all attentions with one model."""
    groups = make_groups(given.tokens, MODELS[name]["vocab_size"])
    by_attention: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_policy(name, given.device, given.dtype == "bfloat16", Path(folder))
        for attention in given.attention:
            by_attention[attention] = try_attention(attention, Path(folder), groups, given, peak)
    sdpa = by_attention.get("sdpa", {}).get("train_seconds")
    parameters = None
    for attention, figures in by_attention.items():
        parameters = figures.pop("parameters", parameters)
        if sdpa and attention != "sdpa" and "reason" not in figures:
            figures["speedup_over_sdpa"] = sdpa / figures["train_seconds"]
    lengths = sorted(len(each.model_tokens) for group in groups for each in group.rollouts)
    return {
        "parameters": parameters,
        "shape": MODELS[name],
        "completions": len(lengths),
        "completion_tokens": {
            "shortest": lengths[0],
            "median": lengths[len(lengths) // 2],
            "longest": lengths[-1],
            "sum": sum(lengths),
        },
        "attention": by_attention,
    }
