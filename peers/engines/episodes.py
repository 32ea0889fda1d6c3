"""Episodes: an engine generates and the environment answers in turns, until every episode is over.

Each episode goes on by itself: its next turn is submitted as soon as the environment has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from peers.engines.engine import Engine, Piece, Request
from peers.environments import Environment, Renderer, Task
from peers.environments.base import multi_turn
from peers.environments.episodes import EpisodeLimits, environment_tokens
from swarm.messages import Sampling
from swarm.rollouts.rollout import Rollout, Segment, Span
from swarm.world.progress import checkpoint


@dataclass
class SpanStates:
    """The hidden states from which one policy sampled successive tokens of an episode."""

    policy: int
    before: Tensor
    """bf16 [at most 128, hidden]: the rows just before the first of `hidden`, of the same
    policy."""
    parts: list[Tensor]

    @property
    def hidden(self) -> Tensor:
        """bf16 [tokens, hidden]."""
        return _joined(self.parts)


OnEnd = Callable[[int, Rollout, Sequence[SpanStates]], None]
"""(row, rollout, the states of each of its spans)."""


@dataclass(frozen=True)
class Episodes:
    """Finished episodes, row by row; n = model tokens of the row."""

    rollouts: list[Rollout]
    hidden: list[Tensor]
    """bf16 [n, hidden]: see `peers.engines.engine.Piece`."""
    prompt_hidden: list[Tensor]
    """bf16 [at most 128, hidden]: the rows before the first of `hidden`."""


@dataclass
class _Row:
    """An unfinished episode."""

    environment: Environment
    task: Task
    row: int
    segments: list[Segment]
    states: list[SpanStates]
    last: int | None = None
    """Id of the last request."""

    def request(self, id: int, noise_key: tuple[int, int] | None, sampling: Sampling) -> Request:
        """The request for the episode's next model segment."""
        continues, self.last = self.last, id
        return Request(
            id=id,
            tokens=[token for segment in self.segments for token in segment.tokens],
            row=self.row,
            noise_key=noise_key,
            temperature=sampling.temperature,
            stop_ids=tuple(sampling.stop_ids),
            limit=sampling.max_new_tokens,
            start=sum(len(each.tokens) for each in self.segments if each.kind == "model"),
            continues=continues,
            keep=multi_turn(self.environment) is not None,
        )

    def add(self, piece: Piece) -> None:
        """Append the model segment that a request gave."""
        self.segments.append(
            Segment(
                "model",
                piece.tokens,
                piece.finish,
                piece.log_probabilities.tolist(),
                tuple(Span(policy, count) for policy, count in piece.spans),
            )
        )
        rows = torch.split(piece.hidden, [count for _, count in piece.spans])
        before = [piece.prompt_hidden, *piece.swap_hidden]
        for (policy, _), part, rows_before in zip(piece.spans, rows, before, strict=True):
            if self.states and self.states[-1].policy == policy:
                self.states[-1].parts.append(part)
            else:
                self.states.append(SpanStates(policy, rows_before, [part]))

    def rollout(self) -> Rollout:
        return Rollout(tuple(self.segments))


def play(
    engine: Engine,
    renderer: Renderer,
    work: Sequence[tuple[Environment, Task]],
    rows: Sequence[int],
    noise_key: tuple[int, int] | None,
    sampling: Sampling,
    on_end: OnEnd | None = None,
    before_step: Callable[[], None] = checkpoint,
) -> Episodes:
    """Play one episode per task on an engine with no other requests.

    `rows` and `noise_key` as in `Request`. `on_end` hears of each episode as soon as it is over.
    `before_step` is called before each of the engine's steps, and may load other weights.
    Raises `ValueError` as `Engine.submit` does, and `UserError` for an environment whose code
    fails; the engine then holds no request.
    """
    limits = EpisodeLimits(
        sampling.stop_ids, sampling.max_new_tokens, engine.capabilities.length_max
    )
    prompts = {task.prompt: renderer.encode_prompt(task.prompt) for _, task in work}
    played = [
        _Row(environment, task, row, [Segment("prompt", prompts[task.prompt])], [])
        for (environment, task), row in zip(work, rows, strict=True)
    ]
    ids = count()
    going: dict[int, _Row] = {}

    def ask(row: _Row) -> None:
        request = row.request(next(ids), noise_key, sampling)
        going[request.id] = row
        engine.submit(request)

    try:
        for row in played:
            ask(row)
        while going:
            before_step()
            for piece in engine.step():
                row = going.pop(piece.id)
                row.add(piece)
                answer = environment_tokens(
                    row.environment, row.task, renderer, row.segments, limits
                )
                if answer is None:
                    engine.cancel(piece.id)  # releases its cache
                    if on_end is not None:
                        on_end(row.row, row.rollout(), row.states)
                else:
                    row.segments.append(Segment("environment", answer))
                    ask(row)
    except BaseException:
        for id in range(next(ids)):  # a turn not submitted has left the cache of its last
            engine.cancel(id)
        raise
    return Episodes(
        rollouts=[row.rollout() for row in played],
        hidden=[_joined([states.hidden for states in row.states]) for row in played],
        prompt_hidden=[row.states[0].before for row in played],
    )


def _joined(parts: list[Tensor]) -> Tensor:
    """Rows end to end; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
