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

OnEnd = Callable[[int, Rollout, Tensor, Tensor], None]
"""(row, rollout, hidden, prompt_hidden), as in `Episodes`."""


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
    hidden: list[Tensor]
    prompt_hidden: Tensor | None = None
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
        self.hidden.append(piece.hidden)
        if self.prompt_hidden is None:
            self.prompt_hidden = piece.prompt_hidden

    def ended(self) -> tuple[Rollout, Tensor, Tensor]:
        """The rollout, its hidden states, and the rows before them."""
        assert self.prompt_hidden is not None
        hidden = torch.cat(self.hidden) if len(self.hidden) > 1 else self.hidden[0]
        return Rollout(tuple(self.segments)), hidden, self.prompt_hidden


def play(
    engine: Engine,
    renderer: Renderer,
    work: Sequence[tuple[Environment, Task]],
    rows: Sequence[int],
    noise_key: tuple[int, int] | None,
    sampling: Sampling,
    on_end: OnEnd | None = None,
) -> Episodes:
    """Play one episode per task on an engine with no other requests.

    `rows` and `noise_key` as in `Request`. `on_end` hears of each episode as soon as it is over.
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
            checkpoint()
            for piece in engine.step():
                row = going.pop(piece.id)
                row.add(piece)
                answer = environment_tokens(
                    row.environment, row.task, renderer, row.segments, limits
                )
                if answer is None:
                    engine.cancel(piece.id)  # releases its cache
                    if on_end is not None:
                        on_end(row.row, *row.ended())
                else:
                    row.segments.append(Segment("environment", answer))
                    ask(row)
    except BaseException:
        for id in range(next(ids)):  # a turn not submitted has left the cache of its last
            engine.cancel(id)
        raise
    ended = [row.ended() for row in played]
    return Episodes(
        rollouts=[rollout for rollout, _, _ in ended],
        hidden=[hidden for _, hidden, _ in ended],
        prompt_hidden=[before for _, _, before in ended],
    )
