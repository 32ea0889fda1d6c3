"""Honest workers and cheats: what each hands in for the same work.

A cheat proves what he can prove: where his tokens are not the engine's own samples, he prefills
them with the right policy and builds honest proofs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from peers.calibration.workload import Work
from peers.engines.batch import generate, requests_for
from peers.engines.engine import Engine, Piece
from peers.engines.native import NativeEngine
from peers.engines.sampling import gumbel_noise
from peers.proofs import toploc
from swarm.wire.manifest import Sampling


@dataclass(frozen=True)
class HandedIn:
    """A submission's completions and proofs, row by row."""

    completions: list[list[int]]
    proofs: list[list[bytes]]


class Worker(Protocol):
    """Generates submissions."""

    def submit(self, work: Work, sampling: Sampling) -> HandedIn:
        """Generate one submission."""
        ...


@dataclass(frozen=True)
class Generates:
    """Generates with an engine, `batch` rows at a time. Honest with the policy and these defaults.

    `attempt` is not 0 for text generated before the seed was known.
    """

    engine: Engine
    batch: int = 1 << 20
    threads: int = 1
    temperature_factor: float = 1.0
    attempt: int = 0

    def submit(self, work: Work, sampling: Sampling) -> HandedIn:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            parts = [
                self._generate(
                    work, sampling, range(start, min(start + self.batch, len(work.prompts)))
                )
                for start in range(0, len(work.prompts), self.batch)
            ]
        finally:
            torch.set_num_threads(before)
        return HandedIn(
            [piece.tokens for part in parts for piece in part],
            [proofs for part in parts for proofs in prove_pieces(part)],
        )

    def _generate(self, work: Work, sampling: Sampling, rows: range) -> list[Piece]:
        requests = requests_for(
            [work.prompts[row] for row in rows],
            rows,
            work.key(self.attempt),
            sampling.temperature * self.temperature_factor,
            sampling.stop_ids,
            sampling.max_new_tokens,
        )
        return generate(self.engine, requests)


class Nucleus(NativeEngine):
    """Samples only from the likeliest tokens whose probabilities add up to `top_p`."""

    top_p = 1.0

    def logits(self, states: Tensor) -> Tensor:
        logits = super().logits(states)
        ordered, order = torch.softmax(logits, -1).sort(-1, descending=True)
        outside = ordered.cumsum(-1) - ordered > self.top_p
        return logits.masked_fill(outside.gather(-1, order.argsort(-1)), -torch.inf)


@dataclass(frozen=True)
class BestOf:
    """Samples each row `tries` times, with other noise after the first, and keeps the best."""

    engine: Engine
    tries: int

    def submit(self, work: Work, sampling: Sampling) -> HandedIn:
        best: list[list[int]] = []
        for attempt in range(self.tries):
            made = Generates(self.engine, attempt=attempt).submit(work, sampling).completions
            best = [
                new if work.rewards(row, new) > work.rewards(row, old) else old
                for row, (old, new) in enumerate(zip(best or made, made, strict=True))
            ]
        return proven(self.engine, work, best)


@dataclass(frozen=True)
class Drafts:
    """Samples with another, cheaper engine, and proves with the policy."""

    draft: Engine
    engine: Engine

    def submit(self, work: Work, sampling: Sampling) -> HandedIn:
        return proven(self.engine, work, Generates(self.draft).submit(work, sampling).completions)


@dataclass(frozen=True)
class TakesTies:
    """Takes the other token of a near tie wherever that raises (or lowers) the reward.

    Goes through the ties of each row in order, continues honestly after the change, and keeps the
    first change that helps.
    """

    engine: Engine
    width: float
    lowers: bool = False

    def submit(self, work: Work, sampling: Sampling) -> HandedIn:
        tokens = Generates(self.engine).submit(work, sampling).completions
        tried = self._ties(work, sampling, tokens)
        changed = [[*tokens[row][:position], other] for row, position, other in tried]
        for each, continued in zip(
            tried, self._continued(work, sampling, tried, changed), strict=True
        ):
            row = each[0]
            gain = work.rewards(row, continued) - work.rewards(row, tokens[row])
            if (-gain if self.lowers else gain) > 0:
                tokens[row] = continued
        return proven(self.engine, work, tokens)

    def _ties(
        self, work: Work, sampling: Sampling, completions: Sequence[Sequence[int]]
    ) -> list[tuple[int, int, int]]:
        """(row, position, second token) of each near tie."""
        prefill = self.engine.prefill(
            [[*prompt, *tokens] for prompt, tokens in zip(work.prompts, completions, strict=True)],
            [
                range(len(prompt), len(prompt) + len(tokens))
                for prompt, tokens in zip(work.prompts, completions, strict=True)
            ],
        )
        rows = [row for row, tokens in enumerate(completions) for _ in tokens]
        positions = [position for tokens in completions for position in range(len(tokens))]
        noise = gumbel_noise(
            work.key(),
            torch.tensor(rows),
            torch.tensor(positions),
            self.engine.capabilities.vocabulary_size,
        )
        logits = self.engine.logits(torch.cat(list(prefill.states)))
        best = (logits / sampling.temperature + noise).topk(2)
        near = (best.values[:, 0] - best.values[:, 1] < self.width).nonzero()[:, 0].tolist()
        return [(rows[each], positions[each], int(best.indices[each, 1])) for each in near]

    def _continued(
        self,
        work: Work,
        sampling: Sampling,
        tried: Sequence[tuple[int, int, int]],
        changed: list[list[int]],
    ) -> list[list[int]]:
        open_ = [
            index
            for index, tokens in enumerate(changed)
            if tokens[-1] not in sampling.stop_ids and len(tokens) < sampling.max_new_tokens
        ]
        requests = requests_for(
            [[*work.prompts[tried[index][0]], *changed[index]] for index in open_],
            [tried[index][0] for index in open_],
            work.key(),
            sampling.temperature,
            sampling.stop_ids,
            sampling.max_new_tokens,
            starts=[len(changed[index]) for index in open_],
        )
        result = list(changed)
        for index, piece in zip(open_, generate(self.engine, requests), strict=True):
            result[index] = [*changed[index], *piece.tokens]
        return result


def prove(prompt_hidden: Sequence[Tensor], hidden: Sequence[Tensor]) -> list[list[bytes]]:
    """The proofs of each row."""
    chunks = [toploc.chunk_rows(*each) for each in zip(prompt_hidden, hidden, strict=True)]
    proofs = iter(toploc.build([chunk for row in chunks for chunk in row]))
    return [[next(proofs) for _ in row] for row in chunks]


def prove_pieces(pieces: Sequence[Piece]) -> list[list[bytes]]:
    """The proofs of each piece."""
    return prove([each.prompt_hidden for each in pieces], [each.hidden for each in pieces])


def proven(engine: Engine, work: Work, completions: list[list[int]]) -> HandedIn:
    """Completions with the proofs that `engine` gives for them."""
    prefill = engine.prefill(
        [[*prompt, *tokens] for prompt, tokens in zip(work.prompts, completions, strict=True)],
        [
            list(range(len(prompt), len(prompt) + len(tokens)))
            for prompt, tokens in zip(work.prompts, completions, strict=True)
        ],
    )
    return HandedIn(completions, prove(prefill.prompt_hidden, prefill.hidden))
