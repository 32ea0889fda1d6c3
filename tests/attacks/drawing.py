"""Cheats that draw tokens by a rule of their own, with the right policy and honest proofs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peers.calibration.work import HandedIn
from peers.engines.engine import Engine
from peers.engines.noise import gumbel_noise
from swarm.wire.manifest import Sampling
from tests.attacks.cheats import Work, proven


@dataclass(frozen=True)
class Drawing:
    """The next token of some unfinished rollouts."""

    work: Work
    sampling: Sampling
    rows: Sequence[int]
    """Row of each rollout in the submission."""
    texts: Sequence[Sequence[int]]
    """[rows] The tokens drawn so far."""
    engine: Engine

    @property
    def position(self) -> int:
        return len(self.texts[0])

    def logits_of(self, engine: Engine) -> Tensor:
        """[rows, vocabulary] Logits of an engine, divided by the temperature."""
        sequences = [
            [*self.work.prompts[row], *text, 0]
            for row, text in zip(self.rows, self.texts, strict=True)
        ]
        last = [[len(sequence) - 1] for sequence in sequences]
        states = torch.cat(engine.prefill(sequences, last).states)
        return engine.logits(states) / self.sampling.temperature

    def noise(self, rows: Sequence[int] | None = None) -> Tensor:
        """[rows, vocabulary] The seed's noise at this position, of these rows or of other ones."""
        return gumbel_noise(
            self.work.key(),
            torch.tensor(self.rows if rows is None else rows),
            torch.tensor(self.position),
            self.engine.capabilities.vocabulary_size,
        )

    def honest(self) -> Tensor:
        """[rows, vocabulary] What an honest worker takes the argmax of."""
        return self.logits_of(self.engine) + self.noise()

    def answers(self) -> list[int]:
        """[rows] The next token of the right answer, or the stop token after it."""
        stop = self.sampling.stop_ids[0]
        found = []
        for row in self.rows:
            digits = sorted(self.work.prompts[row][1:7])  # the task is to sort six digits
            found.append(digits[self.position] if self.position < 6 else stop)
        return found

    def is_right(self) -> Tensor:
        """[rows] Whether each rollout agrees with the answer so far."""
        return torch.tensor(
            [
                list(text) == sorted(self.work.prompts[row][1:7])[: self.position]
                for row, text in zip(self.rows, self.texts, strict=True)
            ]
        )


Rule = Callable[[Drawing], Tensor]
"""The next token of each rollout, int64 [rows]."""


@dataclass(frozen=True)
class Draws:
    """Draws by `rule`, and proves what it drew."""

    engine: Engine
    rule: Rule
    draft: Engine | None = field(default=None)
    """An engine that the rule may ask too."""

    @torch.inference_mode()
    def submit(self, work: Work, sampling: Sampling) -> HandedIn:
        texts: list[list[int]] = [[] for _ in work.prompts]
        live = list(range(len(texts)))
        while live:
            given = Drawing(work, sampling, live, [texts[row] for row in live], self.engine)
            for row, token in zip(live, self.rule(given).tolist(), strict=True):
                texts[row].append(token)
            live = [
                row
                for row in live
                if texts[row][-1] not in sampling.stop_ids
                and len(texts[row]) < sampling.max_new_tokens
            ]
        return proven(self.engine, work, texts)


def within(drawing: Drawing, wanted: Tensor, margin: float) -> Tensor:
    """Take `wanted` where it is at most `margin` behind the honest token, else that one."""
    honest = drawing.honest()
    best, token = honest.max(-1)
    behind = best - honest.gather(-1, wanted[:, None])[:, 0]
    return torch.where(behind <= margin, wanted, token)
