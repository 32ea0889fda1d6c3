"""Episodes: an engine generates and the environment answers in turns, until every episode is over.

Each turn after the first prefills the whole episode again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peers.engines.engine import Engine
from peers.environments import Environment, Renderer, Task
from peers.environments.episodes import EpisodeLimits, environment_tokens
from swarm.messages import Sampling
from swarm.rollouts.rollout import Rollout, Segment, Span


@dataclass(frozen=True)
class Episodes:
    """Finished episodes, row by row; n = model tokens of the row."""

    rollouts: list[Rollout]
    hidden: list[Tensor]
    """bf16 [n, hidden]: see `peers.engines.engine.Completions`."""
    prompt_hidden: list[Tensor]
    """bf16 [at most 128, hidden]: the rows before the first of `hidden`."""


@dataclass
class _Row:
    """An unfinished episode."""

    segments: list[Segment]
    hidden: list[Tensor]
    prompt_hidden: Tensor | None = None

    def tokens(self) -> list[int]:
        return [token for segment in self.segments for token in segment.tokens]

    def sampled(self) -> int:
        return sum(len(each.tokens) for each in self.segments if each.kind == "model")


def play(
    engine: Engine,
    renderer: Renderer,
    work: Sequence[tuple[Environment, Task]],
    rows: Sequence[int],
    noise_key: tuple[int, int] | None,
    sampling: Sampling,
    policy: int = 0,
) -> Episodes:
    """Play one episode per task; `policy` is the number of the policy loaded in the engine.

    `rows` and `noise_key` as for `Engine.generate`. Raises `ValueError` as `generate` does, and
    `UserError` for an environment whose code fails.
    """
    limits = EpisodeLimits(sampling.stop_ids, sampling.max_new_tokens, engine.length_max)
    prompts = {task.prompt: renderer.encode_prompt(task.prompt) for _, task in work}
    played = [_Row([Segment("prompt", prompts[task.prompt])], []) for _, task in work]
    going = list(range(len(work)))
    while going:
        made = engine.generate(
            [played[index].tokens() for index in going],
            [rows[index] for index in going],
            noise_key,
            sampling.temperature,
            sampling.stop_ids,
            sampling.max_new_tokens,
            starts=[played[index].sampled() for index in going],
        )
        further = []
        for position, index in enumerate(going):
            row, tokens = played[index], made.tokens[position]
            row.segments.append(
                Segment(
                    "model",
                    tokens,
                    "stop" if tokens[-1] in sampling.stop_ids else "length",
                    made.log_probabilities[position].tolist(),
                    (Span(policy, len(tokens)),),
                )
            )
            row.hidden.append(made.hidden[position])
            if row.prompt_hidden is None:
                row.prompt_hidden = made.prompt_hidden[position]
            answer = environment_tokens(*work[index], renderer, row.segments, limits)
            if answer is not None:
                row.segments.append(Segment("environment", answer))
                further.append(index)
        going = further
    return Episodes(
        rollouts=[Rollout(tuple(row.segments)) for row in played],
        hidden=[torch.cat(row.hidden) if len(row.hidden) > 1 else row.hidden[0] for row in played],
        prompt_hidden=[row.prompt_hidden for row in played if row.prompt_hidden is not None],
    )
