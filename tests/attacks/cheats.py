"""Cheats: what they hand in for the work of an honest worker (`peers.calibration.workers`).

A cheat proves what he can prove: where his tokens are not the engine's own samples, he prefills
them with the right policy and builds honest proofs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from peers.calibration.calibrate import EngineClass
from peers.calibration.workers import Generates, HandedIn, prove
from peers.calibration.workload import Work
from peers.engines.batch import generate, requests_for
from peers.engines.engine import Engine
from peers.engines.native import NativeEngine
from peers.engines.sampling import gumbel_noise
from swarm.wire.manifest import Sampling
from tests.attacks import weights

TEMPERATURES = (0.9, 1.1)
TOP_P = (0.99, 0.95)
TRIES = (2, 4)
TIE_WIDTHS = (0.1, 0.5)
CHANGES: dict[str, Callable[[], weights.Change]] = {
    "other weights (2 % noise)": lambda: weights.noisy(0.02),
    "fp8 weights": lambda: weights.fp8,
    "int8 weights": lambda: weights.int8,
    "int4 weights": lambda: weights.int4,
    "one layer off by 5 %": lambda: weights.one_layer(0.05),
}


class Worker(Protocol):
    """Generates submissions."""

    def submit(self, work: Work, sampling: Sampling) -> HandedIn:
        """Generate one submission."""
        ...


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


def attacks(
    folder: Path, aside: Path, engine_class: EngineClass, previous: Sequence[Path] = ()
) -> Iterator[tuple[str, Worker]]:
    """Every cheat, by name."""
    policy = engine_class.engine(folder)
    drafts = {}
    for number, (name, change) in enumerate(CHANGES.items()):
        changed = weights.write_changed(folder, aside / str(number), change())
        drafts[name] = engine_class.engine(changed)
        yield name, Generates(drafts[name])
    for older in previous:
        yield f"older policy {older.name}", Generates(engine_class.engine(older))
    for factor in TEMPERATURES:
        yield f"temperature {factor}", Generates(policy, temperature_factor=factor)
    for top_p in TOP_P:
        nucleus = engine_class.engine(folder, Nucleus)
        assert isinstance(nucleus, Nucleus)
        nucleus.top_p = top_p
        yield f"top-p {top_p}", Generates(nucleus)
    yield "pre-generated", Generates(policy, attempt=1)
    for tries in TRIES:
        yield f"best of {tries}", BestOf(policy, tries)
    yield "int4 decodes, policy proves", Drafts(drafts["int4 weights"], policy)
    for width in TIE_WIDTHS:
        yield f"takes near ties below {width} for reward", TakesTies(policy, width)
        yield f"takes near ties below {width} against it", TakesTies(policy, width, lowers=True)
