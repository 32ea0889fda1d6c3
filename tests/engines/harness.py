"""Helpers for tests of engines."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from peers.engines.batch import generate, requests_for
from peers.engines.engine import Engine, Piece, Prefill


class Made(list[Piece]):
    """Pieces, and their fields by name."""

    @property
    def tokens(self) -> list[list[int]]:
        return [piece.tokens for piece in self]

    @property
    def hidden(self) -> list[Tensor]:
        return [piece.hidden for piece in self]

    @property
    def log_probabilities(self) -> list[Tensor]:
        return [piece.log_probabilities for piece in self]

    @property
    def prompt_hidden(self) -> list[Tensor]:
        return [piece.prompt_hidden for piece in self]


def complete(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    key: tuple[int, int] | None,
    temperature: float,
    stop_ids: Sequence[int],
    limit: int,
    starts: Sequence[int] | None = None,
) -> Made:
    """Generate a whole batch."""
    requests = requests_for(prompts, rows, key, temperature, stop_ids, limit, starts)
    return Made(generate(engine, requests))


def prefill_completions(
    engine: Engine, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> Prefill:
    """Prefill single-turn rollouts."""
    return engine.prefill(
        [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)],
        [
            range(len(prompt), len(prompt) + len(completion))
            for prompt, completion in zip(prompts, completions, strict=True)
        ],
    )
