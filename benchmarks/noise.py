"""What seeded noise adds to a decoding step.

    python -m benchmarks.noise
    python -m benchmarks.noise --widths 128 --vocabularies 64,32000 --rounds 3

Prints one JSON object. For each width and vocabulary a random model of Qwen2's shape with
`--layers` layers decodes eight rows without noise (`step_ms`, per token of all rows). Then the
engine's own choice of tokens is timed on random logits: normal ones with a standard deviation of 2,
3 and 4, and flat ones. `all_share` is what noise for every token adds to that step, `share` what
the engine adds, which computes it only for tokens that can win where that pays.

Processor seconds, one thread, CPU; each figure is the median of `--rounds` rounds, with the least
and the most.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import at_least, load_average, several, spread, timed
from benchmarks.engine import (
    GROUP,
    KEY,
    Size,
    make_model,
    make_requests,
    native_engine,
    random_prompts,
)
from peers.engines.batch import generate
from peers.engines.noise import Ahead, choose, noise_of
from swarm.terminal.output import print_json

STEPS = 16
DEVIATIONS = {"flat": 0.0, "std 2": 2.0, "std 3": 3.0, "std 4": 4.0}
"""Standard deviations of the logits, by name."""


@dataclass(eq=False)
class Row:
    noise_row: int
    noise_key: tuple[int, int] | None
    position: int = 0
    noise: Ahead | None = None


def draw(logits: Tensor, key: tuple[int, int] | None, everything: bool = False) -> None:
    """Choose `STEPS` tokens for each row, as the engine does or with noise for every token."""
    rows = [Row(index, key) for index in range(len(logits))]
    for _ in range(STEPS):
        if everything:
            noise_of(rows, logits).add_(logits).max(-1)
        else:
            choose(rows, logits)
        for row in rows:
            row.position += 1


def measure(width: int, vocabulary: int, layers: int, rounds: int) -> dict[str, Any]:
    """One model's step, and the shares that noise adds to it."""
    size = Size(width, 3 * width, layers, width // 64, max(1, width // 512), vocabulary)
    made = make_requests(random_prompts(vocabulary, 1), GROUP, STEPS)
    requests = [replace(each, limit=STEPS, noise_key=None) for each in made]
    with tempfile.TemporaryDirectory(prefix="noise-") as folder:
        make_model(Path(folder), size)
        engine = native_engine(Path(folder), GROUP, "float32")
        generate(engine, requests)
        steps = [timed(generate, engine, requests)[1] / STEPS for _ in range(rounds)]
    told: dict[str, Any] = spread("step_ms", [1e3 * each for each in steps], 2)
    step = told["step_ms"] / 1e3
    for name, deviation in DEVIATIONS.items():
        generator = torch.Generator().manual_seed(vocabulary)
        logits = deviation * torch.randn(GROUP, vocabulary, generator=generator)
        shares: dict[str, list[float]] = {"all_share": [], "share": []}
        draw(logits, KEY)
        for _ in range(rounds):
            without, whole, ours = (
                timed(draw, logits, *how)[1] / STEPS for how in ((None,), (KEY, True), (KEY,))
            )
            shares["all_share"].append((whole - without) / step)
            shares["share"].append((ours - without) / step)
        told[name] = {
            figure: value
            for share, values in shares.items()
            for figure, value in spread(share, values, 4).items()
        }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--widths", type=several(at_least(64)), default=[128, 2048])
    parser.add_argument("--vocabularies", type=several(at_least(8)), default=[64, 32_000, 150_000])
    parser.add_argument("--layers", type=at_least(1), default=4)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    told: dict[str, Any] = {**vars(given), "load_average": load_average()}
    for width in given.widths:
        for vocabulary in given.vocabularies:
            name = f"width {width}, vocabulary {vocabulary}"
            told[name] = measure(width, vocabulary, given.layers, given.rounds)
    print_json(told)


if __name__ == "__main__":
    main()
