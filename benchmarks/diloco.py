"""Several trainers with an outer loop against synchronous training on the same tokens.

    python -m benchmarks.diloco --seeds 3 > diloco.json
    python -m benchmarks.study_plot diloco.json diloco.png --ylabel "held-back loss"

All variants begin with the same pre-trained model, and take the same number of optimiser steps with
the same schedule (warm-up, stable, decay to 0), each at its own tuned learning rate:

- *synchronous*: one trainer with the same blocks in every round, and a batch as large as all
  batches together;
- *alone*: one trainer with its own batch, so a part of the tokens;
- *fp32*, *int8*, *sparse*: the outer loop with each compression;
- *mean*: as int8, but the outer step takes the mean of the weights, without momentum.

`--learning-rates`, `--inner-steps` and `--outer` take several values and try each. Prints one JSON
object: for each case the loss on text held back (nats per token; median and range over the seeds),
its difference to the synchronous loss of the same seed, and its curve; for the outer loop the bytes
that a trainer sends, how many times as much it would send as a gradient in fp32 per step, and
whether all trainers hold the same state after every round, to the bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import at_least, number_where, several
from benchmarks.outer_loop import PLAIN, Outcome, Setting, Variant, pretrain, read_text, train
from benchmarks.spread import spread
from benchmarks.study import band
from peers.outer.learning.state import OuterOptimiser
from swarm.terminal.output import print_json

INNER_STEPS = 25

VARIANTS = {
    "synchronous": Variant(2e-2, INNER_STEPS, several=False, whole_batch=True),
    "alone": Variant(3e-3, INNER_STEPS, several=False),
    "fp32": Variant(2e-2, INNER_STEPS, "fp32", OuterOptimiser()),
    "int8": Variant(2e-2, INNER_STEPS, "int8", OuterOptimiser()),
    "sparse": Variant(2e-2, INNER_STEPS, "sparse", OuterOptimiser()),
    "mean": Variant(2e-2, INNER_STEPS, "int8", PLAIN),
}
"""With the best inner learning rate of 3e-3, 1e-2 and 2e-2 for each, on seed 0."""


def cases(given: argparse.Namespace) -> Iterator[tuple[str, Variant]]:
    """The variants, each with every value of the options that have several."""
    for name in given.variants:
        variant = VARIANTS[name]
        rates = given.learning_rates or [variant.learning_rate]
        outer = given.outer if given.outer and variant.several else [variant.outer]
        steps = given.inner_steps if variant.several else given.inner_steps[:1]
        for rate in rates:
            for inner_steps in steps:
                for optimiser in outer:
                    words = [name]
                    words += [f"rate {rate:g}"] * (len(rates) > 1)
                    words += [f"H {inner_steps}"] * (len(steps) > 1)
                    words += [f"outer {optimiser.learning_rate:g}/{optimiser.momentum:g}"] * (
                        len(outer) > 1
                    )
                    yield (
                        " ".join(words),
                        replace(
                            variant, learning_rate=rate, inner_steps=inner_steps, outer=optimiser
                        ),
                    )


def report(
    outcomes: Sequence[Outcome], variant: Variant, synchronous: Sequence[Outcome]
) -> dict[str, Any]:
    """Figures of one case over the seeds; `synchronous`: those to compare with, if any."""
    rounds = len(outcomes[0].loss) - 1
    found: dict[str, Any] = spread("loss", [each.loss[-1] for each in outcomes])
    if synchronous:
        pairs = zip(outcomes, synchronous, strict=True)
        found |= spread("above_synchronous", [one.loss[-1] - two.loss[-1] for one, two in pairs])
    if variant.several:
        gradients = 4 * rounds * variant.inner_steps  # bytes of a parameter's gradients in fp32
        sent = [each.sent_bytes / each.parameters for each in outcomes]
        found |= spread("bytes_per_parameter_and_round", [each / rounds for each in sent], 4)
        found |= spread("times_less_than_gradients", [gradients / each for each in sent], 1)
        found["states_agree"] = all(len(each.digests) == rounds for each in outcomes)
    curve = band([each.loss for each in outcomes])
    return {
        **found,
        "curve": {**curve, "step": [step * variant.inner_steps for step in curve["step"]]},
    }


def variant(name: str) -> str:
    """A variant's name, from an option."""
    if name not in VARIANTS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(VARIANTS)}")
    return name


def outer(text: str) -> OuterOptimiser:
    """An outer optimiser, from an option like 0.7/0.9."""
    rate, _, momentum = text.partition("/")
    return OuterOptimiser(
        number_where(lambda value: 0 < value <= 10, "above 0")(rate),
        number_where(lambda value: 0 <= value < 1, "from 0 to below 1")(momentum),
    )


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    rate = number_where(lambda value: 0 < value <= 1, "above 0")
    parser.add_argument("--seeds", type=at_least(1), default=1, help="how many seeds, from 0")
    parser.add_argument("--trainers", type=at_least(1), default=4)
    parser.add_argument("--pretraining-steps", type=at_least(1), default=400)
    parser.add_argument("--steps", type=at_least(1), default=500, help="of each trainer")
    parser.add_argument("--batch", type=at_least(1), default=8, help="of one trainer")
    parser.add_argument("--sequence-tokens", type=at_least(2), default=65)
    parser.add_argument("--characters", type=at_least(10_000), default=2_500_000, help="of text")
    parser.add_argument("--inner-steps", type=several(at_least(1)), default=[INNER_STEPS])
    parser.add_argument("--learning-rates", type=several(rate), help="default: tuned ones")
    parser.add_argument("--outer", type=several(outer), help="learning rate/momentum")
    parser.add_argument("--variants", type=several(variant), default=list(VARIANTS))
    given = parser.parse_args()
    for inner_steps in given.inner_steps:
        if given.steps % inner_steps:
            parser.error(
                f"--steps is {given.steps}, which is no whole number of rounds of {inner_steps} "
                "steps"
            )
    return given


def main() -> None:
    given = read_arguments()
    torch.set_num_threads(1)
    found: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="swarm-diloco-") as name:
        folder = Path(name)
        corpus = read_text(folder, given.characters, given.sequence_tokens)
        for seed in range(given.seeds):
            demo = folder / "demo"
            setting = Setting(demo, corpus, seed, given.trainers, given.batch, given.steps)
            pretrain(setting, given.pretraining_steps, folder / f"base-{seed}")
            setting = replace(setting, base=folder / f"base-{seed}")
            for title, each in cases(given):
                outcome = train(setting, each)
                found.setdefault(title, []).append(outcome)
                loss = " ".join(f"{value:.3f}" for value in outcome.loss)
                print(f"seed {seed}, {title}: {loss}", file=sys.stderr, flush=True)
    synchronous = found.get("synchronous", [])
    print_json({title: report(found[title], each, synchronous) for title, each in cases(given)})


if __name__ == "__main__":
    main()
