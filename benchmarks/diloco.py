"""Several trainers with an outer loop against synchronous training on the same tokens.

    python -m benchmarks.diloco --seeds 3 > diloco.json
    python -m benchmarks.study_plot diloco.json diloco.png --ylabel "held-back loss"

`--trainers` replicas train in turn in one process, through the same files as a run's. A
character model of 0.23 million parameters learns this repository's documentation from random
weights. Every variant takes the same number of optimiser steps, with the same schedule:

- *synchronous*: one trainer with the same blocks in every round, and a batch as large as all
  batches together;
- *alone*: one trainer with its own batch, so a part of the tokens;
- *fp32*, *int8*, *sparse*: the outer loop with each compression;
- *mean*: as int8, but the outer step takes the mean of the weights, without momentum.

Prints one JSON object: for each variant the loss on text held back (nats per token; median and
range over the seeds) and its curve; for the outer loop the bytes that a trainer sends, and how many
times as much it would send as a gradient in fp32 per step.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.arguments import at_least, several
from benchmarks.spread import spread
from benchmarks.study import band
from peers.engines.demo import make_policy
from peers.outer.learning import contribution, state
from peers.outer.learning.replica import Replica
from peers.outer.learning.state import Given, OuterOptimiser, StateFile
from peers.outer.learning.tensor_file import Shapes
from peers.trainer.learning.ranks import Ranks
from peers.trainer.learning.stored import StoredWeights
from swarm.app.output import print_json
from swarm.jobs.outer import Inner, StartReplica
from swarm.manifest import Optimiser

DOCUMENTATION = Path(__file__).parents[1] / "docs"
CHARACTERS = 200_000
"""Length of the text: enough for a tiny model, and tokenized in a second."""

HELD_BACK = 64
"""Sequences to measure on."""

PLAIN = OuterOptimiser(learning_rate=1.0, momentum=0.0)
"""The outer step that takes the inner weights as they are."""

Compression = Literal["fp32", "int8", "sparse"]


@dataclass(frozen=True)
class Variant:
    """How the batches are divided and merged."""

    compression: Compression = "fp32"
    outer: OuterOptimiser = PLAIN
    several: bool = True
    """Whether there are several trainers, or one."""
    whole_batch: bool = False
    """Whether the one trainer has the batch of all."""


VARIANTS = {
    "synchronous": Variant(several=False, whole_batch=True),
    "alone": Variant(several=False),
    "fp32": Variant("fp32", OuterOptimiser()),
    "int8": Variant("int8", OuterOptimiser()),
    "sparse": Variant("sparse", OuterOptimiser()),
    "mean": Variant("int8", PLAIN),
}


@dataclass(frozen=True)
class Setting:
    """What all variants have in common, for one seed."""

    base: Path
    text: Path
    seed: int
    trainers: int
    batch: int
    sequence_tokens: int
    inner_steps: int
    rounds: int
    learning_rate: float

    def job(self, trainer: str, trainers: Sequence[str], variant: Variant) -> StartReplica:
        """The job of one of `trainers`."""
        inner = Inner(
            data=[str(self.text)],
            sequence_tokens=self.sequence_tokens,
            batch_sequences=self.batch * (self.trainers if variant.whole_batch else 1),
            validation_sequences=HELD_BACK,
            optimiser=Optimiser(
                learning_rate=self.learning_rate,
                beta2=0.95,
                gradient_norm_max=1.0,
                warmup_steps=10,
                learning_rate_schedule="wsd",
                final_learning_rate_share=0.0,
            ),
        )
        return StartReplica(
            model=str(self.base),
            trainer=trainer,
            trainers=tuple(trainers),
            seed=self.seed,
            inner=inner,
            inner_steps=self.inner_steps,
            rounds=self.rounds,
            compression=variant.compression,
        )


@dataclass
class Outcome:
    """Figures of one training."""

    loss: list[float]
    """On the text held back, before round 1 and after each round."""
    bytes: int
    """Sent by one trainer in all rounds."""
    parameters: int


def train(setting: Setting, variant: Variant) -> Outcome:
    """Train one variant."""
    names = [f"trainer-{index}" for index in range(setting.trainers if variant.several else 1)]
    replicas = [Replica(setting.job(name, names, variant), Ranks()) for name in names]
    with tempfile.TemporaryDirectory(prefix="swarm-diloco-") as folder:
        here = Path(folder)
        stored = StoredWeights(setting.base)
        shapes = replicas[0].shapes

        def weight_of(name: str) -> Any:
            return stored.part(name, tuple(slice(None) for _ in shapes[name]))

        state.begin(shapes, weight_of, here / "state-0")
        before = StateFile(here / "state-0")
        found = Outcome([_measured(replicas[0], before)], 0, _size(shapes))
        for round_ in range(1, setting.rounds + 1):
            given = []
            for name, replica in zip(names, replicas, strict=True):
                inner = [here / f"{name}-{each}" for each in (round_ - 1, round_)]
                last = inner[0] if round_ > 1 else None
                replica.begin(before, last)
                tokens = sum(step.tokens for step in replica.steps(round_))
                replica.write(before, last, inner[1], here / f"{name}-given")
                given.append(Given(name, tokens, here / f"{name}-given" / contribution.FILE))
                shutil.rmtree(inner[0], ignore_errors=True)
            found.bytes += given[0].path.stat().st_size
            state.merge(before, given, variant.outer, here / f"state-{round_}")
            before = StateFile(here / f"state-{round_}")
            found.loss.append(_measured(replicas[0], before))
    return found


def _measured(replica: Replica, outer: StateFile) -> float:
    loss = replica.measure(outer)
    assert loss is not None
    return loss


def _size(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def report(outcomes: Sequence[Outcome], inner_steps: int, sends: bool) -> dict[str, Any]:
    """Figures of one variant over the seeds."""
    steps = inner_steps * (len(outcomes[0].loss) - 1)
    found: dict[str, Any] = spread("loss", [each.loss[-1] for each in outcomes])
    if sends:
        gradients = 4 * outcomes[0].parameters * steps  # one fp32 gradient per step
        found |= spread(
            "bytes_per_parameter_and_round",
            [each.bytes / each.parameters / (len(each.loss) - 1) for each in outcomes],
        )
        found |= spread(
            "times_less_than_gradients", [gradients / each.bytes for each in outcomes], 1
        )
    curve = band([each.loss for each in outcomes])
    return {**found, "curve": {**curve, "step": [step * inner_steps for step in curve["step"]]}}


def variant(name: str) -> str:
    """A variant's name, from an option."""
    if name not in VARIANTS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(VARIANTS)}")
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=at_least(1), default=1, help="how many seeds, from 0")
    parser.add_argument("--trainers", type=at_least(1), default=4)
    parser.add_argument("--rounds", type=at_least(1), default=6)
    parser.add_argument("--inner-steps", type=at_least(1), default=50)
    parser.add_argument("--batch", type=at_least(1), default=4, help="of one trainer")
    parser.add_argument("--sequence-tokens", type=at_least(2), default=65)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--variants", type=several(variant), default=list(VARIANTS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = vars(given).copy()
    common = {name: value for name, value in result.items() if name not in ("seeds", "variants")}
    found: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="swarm-diloco-") as folder:
        text = Path(folder) / "text.txt"
        pages = (page.read_text("utf-8") for page in sorted(DOCUMENTATION.glob("*.md")))
        text.write_text("\n".join(pages).lower()[:CHARACTERS])
        for seed in range(given.seeds):
            base = Path(folder) / f"base-{seed}"
            make_policy(base, seed=seed, positions=given.sequence_tokens)
            setting = Setting(base=base, text=text, seed=seed, **common)
            for name in given.variants:
                found.setdefault(name, []).append(train(setting, VARIANTS[name]))
    for name, outcomes in found.items():
        result[name] = report(outcomes, given.inner_steps, VARIANTS[name].several)
    print_json(result)


if __name__ == "__main__":
    main()
