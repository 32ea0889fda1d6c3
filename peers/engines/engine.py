"""The interface of every engine: generate with one policy, and prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor


@dataclass
class Completions:
    """The result of one generated batch, row by row; n = tokens of the row, stop token included."""

    tokens: list[list[int]]
    hidden: list[Tensor]
    """bf16 [n, hidden]: row i is the final-norm hidden state from which token i was sampled."""
    log_probabilities: list[Tensor]
    """fp32 [n]: log_softmax(logits / T) of the sampled token, without noise."""
    prompt_hidden: list[Tensor]
    """bf16 [at most 128, hidden]: the rows just before `hidden`, oldest first. They exclude the
    prompt's last position, which is row 0 of `hidden`."""


@dataclass
class Prefill:
    """The same hidden states, recomputed from given tokens in one pass; n = sampled tokens."""

    hidden: list[Tensor]
    states: list[Tensor]
    """[n, hidden]: `hidden` in the precision it was computed in. `Engine.logits` turns some rows
    at a time into logits, because the logits of a whole batch may take gigabytes."""
    prompt_hidden: list[Tensor]


class Engine(Protocol):
    """Generates with one policy at a time."""

    vocabulary_size: int
    hidden_size: int
    length_max: int
    """The model's context length: all tokens of an episode, the prompt included."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        noise_key: tuple[int, int] | None,
        temperature: float,
        stop_ids: Sequence[int],
        max_new_tokens: int,
        starts: Sequence[int] | None = None,
    ) -> Completions:
        """Generate one completion per prompt, up to its first stop id or the token limit.

        `rows[i]` is the row of prompt i in its submission (group · G + sample). The row and
        `noise_key` determine the noise (see `peers.engines.sampling`); with a key of None the
        likeliest token is taken. A prompt may be an unfinished episode: `starts[i]` is then the
        number of tokens already sampled in it (default 0), and `max_new_tokens` limits the tokens
        sampled in the whole episode. Raises `ValueError` for an empty prompt, an id outside the
        vocabulary, a limit below 1, or more positions than the model's context length.
        """
        ...

    def prefill(
        self, sequences: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]
    ) -> Prefill:
        """Compute teacher-forced hidden states from which the sampled tokens were drawn.

        `sampled[i]` are the ascending indices of the sampled tokens in sequence i. They exclude
        index 0 and include the last index. Raises `ValueError` as `generate` does.
        """
        ...

    def logits(self, states: Tensor) -> Tensor:
        """fp32 logits [n, vocabulary] of some of a prefill's `states`, before the temperature."""
        ...

    def load_weights(self, folder: Path) -> None:
        """Replace the weights by those of another checkpoint of the same model.

        Raises `UserError` when they do not fit; the engine then keeps the old weights.
        """
        ...
