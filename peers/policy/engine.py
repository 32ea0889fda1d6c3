"""What every engine does: generate with one policy, and prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor


@dataclass
class Completions:
    """What one batch generated, row by row. n = tokens of the row, its stop token included."""

    tokens: list[list[int]]
    hidden: list[Tensor]
    """bf16 [n, hidden]: row i is the final-norm hidden state from which token i was sampled."""
    log_probabilities: list[Tensor]
    """fp32 [n]: log_softmax(logits / T) of the sampled token, without noise."""
    prompt_hidden: list[Tensor]
    """bf16 [at most 128, hidden]: the rows just before `hidden`, oldest first. The prompt's last
    position is not among them: it is row 0 of `hidden`."""


@dataclass
class Prefill:
    """The same quantities, recomputed from given tokens in one pass; n = sampled tokens."""

    hidden: list[Tensor]
    states: list[Tensor]
    """[n, hidden]: the same in the precision they were computed in, for `Engine.logits`: all
    logits of a batch together may take gigabytes."""
    prompt_hidden: list[Tensor]


class Engine(Protocol):
    """Generates with one policy at a time."""

    vocabulary_size: int
    hidden_size: int
    length_max: int
    """Positions the model is made for: all tokens of an episode together."""

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
        """One completion per prompt, ending at its first stop id or at the token limit.

        `rows[i]` is the row of prompt i in its submission (group · G + sample): it and `noise_key`
        fix the noise (see `peers.policy.sampling`); a key of None takes the likeliest token.
        A prompt may be an episode so far: `starts[i]` is then the position of the next sampled
        token (by default 0), and `max_new_tokens` limits the tokens sampled in the whole episode.
        Raises `ValueError` for an empty prompt, an id outside the vocabulary, a limit below 1, or
        more positions than the model is made for.
        """
        ...

    def prefill(
        self, sequences: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]
    ) -> Prefill:
        """Teacher-forced hidden states from which tokens of given sequences were sampled.

        `sampled[i]` are the ascending indices of these tokens in sequence i; index 0 is not among
        them, the last index is. Raises `ValueError` as above.
        """
        ...

    def logits(self, states: Tensor) -> Tensor:
        """fp32 [n, vocabulary] of some of a prefill's states, not divided by a temperature."""
        ...

    def load_weights(self, folder: Path) -> None:
        """Swap in the weights of another checkpoint of the same model.

        Raises `UserError` when they do not fit; the old ones then stay.
        """
        ...
