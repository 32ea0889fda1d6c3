"""Cheats: what they hand in for the work of an honest worker (`peers.calibration.work`).

A cheat proves what he can prove: where his tokens are not the engine's own samples, he prefills
them with the right policy and builds honest proofs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

import torch
from torch import Tensor

from peers.calibration.calibrate import EngineClass
from peers.calibration.work import HandedIn, Workload, prove, seed_of
from peers.calibration.work import Work as HonestWork
from peers.engines.batch import generate, requests_for
from peers.engines.config import read_config
from peers.engines.engine import Engine, Piece
from peers.engines.native import NativeEngine
from peers.engines.noise import gumbel_noise
from peers.environments import Environment, Renderer, Task
from peers.environments.episodes import grade_segments
from swarm.rollouts.rollout import Finish, Segment
from swarm.rollouts.seeds import digest, noise_key
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


@dataclass(frozen=True)
class Work(HonestWork):
    """Work whose rewards a cheat is after."""

    rewards: Callable[[int, Sequence[int]], float]
    """(row, completion) → reward."""

    def other_key(self, attempt: int) -> tuple[int, int]:
        """The key of the submission's noise; another attempt's is not the seed's."""
        if attempt == 0:
            return self.key()
        return noise_key(digest("swarm/1/attempt", self.seed, bytes([attempt])))


def work_of(
    seed: bytes,
    drawn: Sequence[tuple[Environment, Task, list[int]]],
    renderer: Renderer,
    sampling: Sampling,
) -> Work:
    """The work of a submission whose groups have these environments, tasks and prompts."""
    size, stops = sampling.group_size, sampling.stop_ids

    def reward(row: int, completion: Sequence[int]) -> float:
        environment, task, prompt = drawn[row // size]
        finish: Finish = "stop" if completion[-1] in stops else "length"
        model = Segment("model", list(completion), finish)
        segments = (Segment("prompt", prompt), model)
        return grade_segments(environment, task, renderer, segments, stops).reward

    return Work(seed, [prompt for _, _, prompt in drawn for _ in range(size)], reward)


class GradedWorkload(Workload):
    """Tasks of environments, with their rewards."""

    def work(self, number: int, name: str = "calibration") -> Work:
        seed = seed_of(number, name)
        return work_of(seed, self.drawn(seed), self.renderer, self.sampling)


class RandomWorkload(GradedWorkload):
    """Random prompts, for a model without a tokenizer; even sums of tokens earn nothing."""

    def __init__(self, folder: Path, sampling: Sampling) -> None:
        self.sampling = sampling
        self._vocabulary: int = read_config(folder)["vocab_size"]

    def work(self, number: int, name: str = "calibration") -> Work:
        seed, sampling = seed_of(number, name), self.sampling
        random = Random(seed)
        rows = []
        for _ in range(sampling.groups_per_submission):
            rows += [random.choices(range(self._vocabulary), k=16)] * sampling.group_size
        return Work(seed, rows, lambda _, completion: float(sum(completion) % 2))


class Worker(Protocol):
    """Generates submissions."""

    def submit(self, work: Work, sampling: Sampling) -> HandedIn:
        """Generate one submission."""


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
            [proofs for part in parts for proofs in _proofs(part)],
        )

    def _generate(self, work: Work, sampling: Sampling, rows: range) -> list[Piece]:
        requests = requests_for(
            [work.prompts[row] for row in rows],
            rows,
            work.other_key(self.attempt),
            sampling.temperature * self.temperature_factor,
            sampling.stop_ids,
            sampling.max_new_tokens,
        )
        return generate(self.engine, requests)


def _proofs(pieces: Sequence[Piece]) -> list[list[bytes]]:
    return prove([each.prompt_hidden for each in pieces], [each.hidden for each in pieces])


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
