"""Random projections of hidden states beside TOPLOC proofs: detection of other weights, by bytes.

    python -m benchmarks.recipe --seeds 1 --keep policies
    python -m benchmarks.sketches --policies policies/0 --step 100
    python -m benchmarks.sketches --layers 24 --width 256

Prints one JSON object. A sketch (compare Activation-DiFR, arXiv 2511.20621) multiplies the final
hidden states of a chunk of 32 tokens with `values` random directions, which the submission's seed
gives. "token" keeps the products of every token, "chunk" their sum under random signs; both are
rounded to 8 bits with one 16-bit scale per chunk, or to 16 bits. Its error is the norm of the
difference from the recomputed products over their norm, at most 1. `--outliers` gives the random
model dimensions that are large and alike in every text; `--weighed` divides every dimension by its
usual size before proofs and sketches see it.

Every scheme meets the same hidden states and is judged in the same way: the bound on honest means
comes from fp32 and bf16 engines in every pair, like that of `swarm proofs calibrate`, and a worker
is evicted by the same bets on its errors (`peers.validator.evidence`), without the other evidence.
Cheats compute in fp32, and so does the validator. `area` is the area under the ROC curve of single
completions, against honest ones in bf16. `nats_per_token` is the mean logarithm of a submission's
e-value over its tokens: about 30 nats evict.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from benchmarks.arguments import at_least
from benchmarks.deep_model import make_deep_model
from peers.calibration.calibrate import CHANGES, EngineClass
from peers.calibration.thresholds import ERROR_SAFETY
from peers.calibration.weights import noisy, write_changed
from peers.calibration.workload import Workload
from peers.demo.recipes import ENVIRONMENT, SAMPLING, THRESHOLDS
from peers.engines.batch import generate, requests_for
from peers.engines.engine import Engine
from peers.environments import load as load_environment
from peers.proofs import toploc
from peers.proofs.format import CHUNK_TOKENS, PROOF_BYTES
from peers.validator.evidence import betting
from swarm.ledger.evidence import WorkerEvidence
from swarm.manifest import Sampling
from swarm.messages import Evidence
from swarm.terminal.output import print_json

DTYPES = ("float32", "bfloat16")
AGES = (1, 2, 5)
ERROR_MIN = 2e-5
"""Least bound on the mean error of a scheme, since betting needs one above 0."""

Errors = dict[str, list[float]]
"""By scheme, the errors of a submission's chunks or tokens."""


@dataclass(frozen=True)
class Scheme:
    """A kind of sketch."""

    per: str
    """chunk or token"""
    values: int
    bits: int

    @property
    def name(self) -> str:
        return f"{self.values} × {self.bits} bits per {self.per}"

    def size_bytes(self, tokens: int) -> int:
        """Bytes of the sketches of a completion."""
        chunks = -(-tokens // CHUNK_TOKENS)
        kept = self.values * (tokens if self.per == "token" else chunks)
        return kept * self.bits // 8 + (2 * chunks if self.bits == 8 else 0)

    def products(self, chunk: Tensor, directions: Tensor, signs: Tensor) -> Tensor:
        """[tokens or 1, values] of a chunk [rows, width]."""
        each = chunk.float() @ directions[:, : self.values]
        if self.per == "token":
            return each
        return (each * signs[: len(each), : self.values]).sum(0, keepdim=True)

    def rounded(self, products: Tensor) -> Tensor:
        """The products as the worker's sketch gives them."""
        if self.bits == 16:
            return products.half().float()
        scale = (products.abs().max().clamp(min=1e-6) / 127).half().float().clamp(min=1e-7)
        return (products / scale).round().clamp(-127, 127) * scale

    def errors(self, claimed: Tensor, own: Tensor, drawn: tuple[Tensor, Tensor]) -> list[float]:
        """The errors of a worker's chunk against the validator's."""
        right = self.products(own, *drawn)
        difference = self.rounded(self.products(claimed, *drawn)) - right
        found: list[float] = (difference.norm(dim=-1) / right.norm(dim=-1)).clamp(max=1).tolist()
        return found


SCHEMES = (
    *(Scheme("chunk", values, 8) for values in (14, 30, 62, 126, 254)),
    *(Scheme("chunk", values, 16) for values in (32, 128)),
    *(Scheme("token", values, 8) for values in (1, 2, 4, 8)),
    *(Scheme("token", values, 16) for values in (2, 4)),
)
TOPLOC = "TOPLOC"


Weigh = Callable[[Tensor], Tensor]
"""What is done to hidden states [n, width] before a scheme sees them, by worker and validator."""


def unchanged(hidden: Tensor) -> Tensor:
    """The hidden states themselves."""
    return hidden


def by_size(engine: Engine, workload: Workload) -> Weigh:
    """Divide every dimension by its usual size under a policy."""
    work = workload.work(0, "sizes")
    sequences = [[*prompt, *prompt[1:]] for prompt in work.prompts[:: SAMPLING.group_size]]
    states = torch.cat(engine.prefill(sequences, [range(1, len(s)) for s in sequences]).states)
    usual = states.float().square().mean(0).sqrt()
    return lambda hidden: (hidden.float() / usual).bfloat16()


def submission(
    worker: Engine, validator: Engine, workload: Workload, number: int, name: str, weigh: Weigh
) -> tuple[Errors, list[int]]:
    """(errors by scheme, lengths of the completions) of one submission."""
    work, sampling = workload.work(number, name), workload.sampling
    requests = requests_for(
        work.prompts,
        range(len(work.prompts)),
        work.key(),
        sampling.temperature,
        sampling.stop_ids,
        sampling.max_new_tokens,
    )
    made = generate(worker, requests)
    sequences = [[*p, *piece.tokens] for p, piece in zip(work.prompts, made, strict=True)]
    sampled = [range(len(p), len(s)) for p, s in zip(work.prompts, sequences, strict=True)]
    own = validator.prefill(sequences, sampled)
    theirs = [(weigh(each.prompt_hidden), weigh(each.hidden)) for each in made]
    ours = [
        (weigh(before), weigh(hidden))
        for before, hidden in zip(own.prompt_hidden, own.hidden, strict=True)
    ]
    claimed, right = (
        [chunk for row in rows for chunk in toploc.chunk_rows(*row)] for rows in (theirs, ours)
    )
    results = toploc.verify(right, toploc.build(claimed))
    errors: Errors = {TOPLOC: [result.error for result in results]}
    drawn = _drawn(worker.capabilities.hidden_size, number)
    pairs = [
        each
        for (_, one), (_, other) in zip(theirs, ours, strict=True)
        for each in zip(_chunks(one), _chunks(other), strict=True)
    ]
    for scheme in SCHEMES:
        errors[scheme.name] = [e for a, b in pairs for e in scheme.errors(a, b, drawn)]
    return errors, [len(piece.tokens) for piece in made]


def _chunks(hidden: Tensor) -> list[Tensor]:
    return [hidden[first : first + CHUNK_TOKENS] for first in range(0, len(hidden), CHUNK_TOKENS)]


def _drawn(width: int, seed: int) -> tuple[Tensor, Tensor]:
    """(directions [width, values], signs [32, values]) of a submission."""
    generator, most = torch.Generator().manual_seed(seed), max(each.values for each in SCHEMES)
    directions = torch.randn(width, most, generator=generator)
    return directions, torch.randint(0, 2, (CHUNK_TOKENS, most), generator=generator) * 2.0 - 1


@dataclass(frozen=True)
class Worker:
    """A worker's submissions, by seed."""

    errors: list[list[Errors]]
    lengths: list[list[list[int]]]


def collect(
    worker: Engine,
    validator: Engine,
    workload: Workload,
    seeds: int,
    submissions: int,
    name: str,
    weigh: Weigh,
) -> Worker:
    """All submissions of a worker."""
    found = [
        [
            submission(worker, validator, workload, number, f"{name} {seed}", weigh)
            for number in range(submissions)
        ]
        for seed in range(seeds)
    ]
    return Worker(
        [[errors for errors, _ in each] for each in found],
        [[lengths for _, lengths in each] for each in found],
    )


def bound(honest: Sequence[Worker], scheme: str) -> float:
    """The bound on honest mean errors, by the rule of `peers.calibration.thresholds`."""
    highest = ERROR_MIN
    for pair in honest:
        means = [statistics.fmean(each[scheme]) for seed in pair.errors for each in seed]
        mean = statistics.fmean(means) + 3 * statistics.pstdev(means) / math.sqrt(len(means))
        highest = max(highest, ERROR_SAFETY * mean)
    return highest


def tokens_until_eviction(
    seed: Sequence[Errors], lengths: Sequence[Sequence[int]], scheme: str, honest: float
) -> int | None:
    """Tokens until the bets on a worker's errors evict it; None if they do not."""
    record, tokens = WorkerEvidence(), 0
    for errors, each in zip(seed, lengths, strict=True):
        tokens += sum(each)
        bets = betting.gains(np.array(errors[scheme]), honest)
        record.add("v", Evidence(tokens=1, sampler=[0], policy=bets, text=[0], selection=[0]))
        if record.standing().p_value <= THRESHOLDS.eviction_p_value:
            return tokens
    return None


def compare(honest: dict[str, Worker], cheats: dict[str, Worker]) -> dict[str, Any]:
    """Every scheme against every cheat. The first half of the honest seeds gives the bounds."""
    sizes: dict[str, Callable[[int], int]] = {
        TOPLOC: lambda tokens: PROOF_BYTES * -(-tokens // CHUNK_TOKENS),
        **{scheme.name: scheme.size_bytes for scheme in SCHEMES},
    }
    half = [Worker(w.errors[::2], w.lengths[::2]) for w in honest.values()]
    rest = [Worker(w.errors[1::2], w.lengths[1::2]) for w in honest.values()]
    rounded = [w for name, w in zip(honest, rest, strict=True) if "bfloat16" in name]
    lengths = [length for w in honest.values() for s in w.lengths for each in s for length in each]
    rows: dict[str, Any] = {}
    for name, size in sizes.items():
        limit = bound(half, name)
        negatives = [error for worker in rounded for error in _completions(worker, name)]
        rows[name] = {
            "bytes_per_token": sum(map(size, lengths)) / sum(lengths),
            "honest_mean_max": limit,
            "honest_evicted": sum(
                tokens_until_eviction(*seed, name, limit) is not None
                for w in rest
                for seed in zip(w.errors, w.lengths, strict=True)
            ),
            "cheats": {
                cheat: _met(worker, name, limit, negatives) for cheat, worker in cheats.items()
            },
        }
    return rows


def _completions(worker: Worker, scheme: str) -> list[float]:
    """The mean error of each completion, all of at most one chunk."""
    found = []
    for errors, lengths in zip(worker.errors, worker.lengths, strict=True):
        for each, sizes in zip(errors, lengths, strict=True):
            whole = np.array(each[scheme])
            ends = np.cumsum(sizes)[:-1] if len(whole) == sum(sizes) else len(sizes)
            found += [float(part.mean()) for part in np.array_split(whole, ends)]
    return found


def _area(honest: list[float], cheat: list[float]) -> float:
    """Area under the ROC curve, like `peers.calibration.plot.area`, for many scores."""
    ordered = np.sort(honest)
    wins = ordered.searchsorted(cheat, "left") + ordered.searchsorted(cheat, "right")
    return float(wins.mean() / (2 * len(honest)))


def _nats_per_token(worker: Worker, scheme: str, limit: float) -> float:
    nats = tokens = 0.0
    for errors, lengths in zip(worker.errors, worker.lengths, strict=True):
        for each, sizes in zip(errors, lengths, strict=True):
            nats += betting.log_e_value(betting.gains(np.array(each[scheme]), limit))
            tokens += sum(sizes)
    return nats / tokens


def _met(worker: Worker, scheme: str, limit: float, negatives: list[float]) -> dict[str, Any]:
    positives = _completions(worker, scheme)
    evicted = [
        tokens_until_eviction(*seed, scheme, limit)
        for seed in zip(worker.errors, worker.lengths, strict=True)
    ]
    tokens = [each for each in evicted if each is not None]
    return {
        "error_mean": statistics.fmean(positives),
        "area": _area(negatives, positives),
        "nats_per_token": _nats_per_token(worker, scheme, limit),
        "evicted": f"{len(tokens)} of {len(evicted)}",
        "tokens_until_eviction": statistics.median(tokens) if tokens else None,
    }


def engines(folder: Path, aside: Path, previous: Sequence[Path]) -> Iterator[tuple[str, Engine]]:
    """The cheats' engines."""
    fp32 = EngineClass("float32", "cpu")
    changes = {name: change() for name, change in CHANGES.items()}
    changes["other weights (0.5 % noise)"] = noisy(0.005)
    for number, (name, change) in enumerate(changes.items()):
        yield name, fp32.engine(write_changed(folder, aside / str(number), change))
    for age in previous:
        yield f"policy {int(folder.name) - int(age.name)} older", fp32.engine(age)
    yield "temperature 0.9", fp32.engine(folder)


def measured(
    folder: Path,
    sampling: Sampling,
    previous: Sequence[Path],
    seeds: int,
    submissions: int,
    weighed: bool = False,
) -> dict[str, Any]:
    """All figures of one model."""
    tokenised = (folder / "tokenizer.json").exists() and previous
    environment = load_environment(ENVIRONMENT.name, ENVIRONMENT.version) if tokenised else None
    workload = Workload(folder, sampling, environment)
    by_dtype = {dtype: EngineClass(dtype, "cpu").engine(folder) for dtype in DTYPES}
    weigh = by_size(by_dtype["float32"], workload) if weighed else unchanged
    honest = {}
    for generating in DTYPES:
        for recomputing in DTYPES:
            name = f"{generating} {recomputing}"
            pair = by_dtype[generating], by_dtype[recomputing]
            honest[name] = collect(*pair, workload, seeds, submissions, name, weigh)
            print(name, file=sys.stderr)
    cheats = {}
    with tempfile.TemporaryDirectory() as aside:
        for name, engine in engines(folder, Path(aside), previous):
            warm = replace(sampling, temperature=0.9 * sampling.temperature)
            work = Workload(folder, warm, environment) if "temperature" in name else workload
            fp32 = by_dtype["float32"]
            cheats[name] = collect(engine, fp32, work, seeds, submissions, name, weigh)
            print(name, file=sys.stderr)
    return compare(honest, cheats)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policies", type=Path, help="folder of policies by step")
    parser.add_argument("--step", type=at_least(0), default=100)
    parser.add_argument("--layers", type=at_least(1), default=24, help="of a random model")
    parser.add_argument("--width", type=at_least(8), default=256)
    parser.add_argument("--vocabulary", type=at_least(64), default=4096)
    parser.add_argument("--outliers", type=at_least(0), default=0, help="dimensions")
    parser.add_argument("--weighed", action="store_true", help="divide dimensions by their size")
    parser.add_argument("--tokens", type=at_least(1), default=32)
    parser.add_argument("--seeds", type=at_least(2), default=10)
    parser.add_argument("--submissions", type=at_least(1), default=16, help="most of one seed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.policies:
        folder: Path = given.policies / str(given.step)
        older = [given.policies / str(given.step - age) for age in AGES]
        previous = [each for each in older if each.exists()]
        size = given.seeds, given.submissions, given.weighed
        print_json(measured(folder, SAMPLING, previous, *size))
        return
    sampling = replace(SAMPLING, max_new_tokens=given.tokens, groups_per_submission=1)
    with tempfile.TemporaryDirectory() as name:
        folder = make_deep_model(
            Path(name),
            layers=given.layers,
            vocabulary=given.vocabulary,
            width=given.width,
            positions=64 + given.tokens,
            outliers=given.outliers,
        )
        size = given.seeds, given.submissions, given.weighed
        print_json(measured(folder, sampling, [], *size))


if __name__ == "__main__":
    main()
