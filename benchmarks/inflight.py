"""Throughput and age with swaps of weights in flight and without, on long-tailed lengths.

    python -m benchmarks.inflight
    python -m benchmarks.inflight --learn 5

Prints one JSON object. One thread, the native engine, a model with random weights; lengths are
log-uniform between 1 and `--limit`, and rows take the slots of finished ones. A new policy arrives
as often as a full batch takes `--every` steps. Then

- `in_flight` loads it at once: the caches of all rows are computed again, and all go on;
- `waiting` finishes the submissions it has begun, of `--rows` rows each, and loads it when the
  batch is empty, as runs with `sampling.swaps_max = 0` do.

`tokens_per_second`, `rows_per_step` (rows that got a token in a step, of `--rows`: the throughput
of a device whose steps take as long for few rows as for many), `policies_per_hour` (those that were
loaded) and `age` (policies that a
token's was behind the newest, on average) are medians of `--rounds` rounds in which both take
turns, with the least and the most. Seconds are processor seconds.

`learn` has the recipe of `benchmarks.recipe` for as many seeds, with and without a swap in the
middle of every completion, from the policy two steps back to the one a step back.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import at_least, several
from benchmarks.engine import SIZES, Size, make_model, make_requests, native_engine
from benchmarks.recipe import run
from benchmarks.spread import load_average, spread
from peers.engines.engine import Engine, Piece, Request
from peers.engines.native import NativeEngine
from swarm.terminal.output import print_json

CALIBRATION_STEPS = 24
SWAP_STEP = 4
"""Tokens of the demo's completions, which have at most 8, before the swap."""


class Batch:
    """An engine, its rows, and the policies that arrive meanwhile."""

    def __init__(self, folder: Path, size: Size, given: argparse.Namespace) -> None:
        self.engine: Engine = native_engine(folder, given.rows)
        self._folder, self._size, self._given = folder, size, given
        self._ids = itertools.count()
        self._going = 0
        self._policy = 0
        self._submission: Iterator[Request] = iter(())

    def measure(self, in_flight: bool, every: float, periods: int) -> dict[str, float]:
        """Generate while a policy arrives every so many processor seconds."""
        tokens = behind = loaded = steps = 0
        began = time.process_time()
        self._policy = 0
        while (spent := time.process_time() - began) < every * periods:
            newest = int(spent / every)
            if newest > self._policy and (in_flight or not self._going):
                self.engine.load_weights(self._folder, newest)
                self._policy, loaded = newest, loaded + 1
            self._fill(may_begin=in_flight or newest == self._policy)
            tokens += self._going
            behind += self._going * (newest - self._policy)
            steps += 1
            self._going -= len(self.engine.step())
        spent = time.process_time() - began
        while self._going:
            self._going -= len(self.engine.step())
        return {
            "tokens_per_second": tokens / spent,
            "rows_per_step": tokens / steps,
            "policies_per_hour": 3600 * loaded / spent,
            "age": behind / max(1, tokens),
        }

    def step_seconds(self) -> float:
        """Processor seconds of a step with a full batch."""
        self._fill(may_begin=True)
        self._going -= len(self.engine.step())
        began = time.process_time()
        for _ in range(CALIBRATION_STEPS):
            self._fill(may_begin=True)
            self._going -= len(self.engine.step())
        return (time.process_time() - began) / CALIBRATION_STEPS

    def _fill(self, may_begin: bool) -> None:
        """Give free slots to the submission's next rows, then to the next submission's."""
        while self._going < self._given.rows:
            request = next(self._submission, None)
            if request is None:
                if not may_begin:
                    return
                self._submission = self._next_submission()
                continue
            self.engine.submit(replace(request, id=next(self._ids)))
            self._going += 1

    def _next_submission(self) -> Iterator[Request]:
        given = self._given
        number = next(self._ids)
        return iter(make_requests(self._size, given.rows, given.prompt, given.limit, False, number))


def measure_size(size: Size, given: argparse.Namespace) -> dict[str, Any]:
    """Both ways with one model, for each interval between policies."""
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="inflight-") as name:
        make_model(Path(name), size)
        batch = Batch(Path(name), size, given)
        step = batch.step_seconds()
        for every in given.every:
            found = defaultdict[str, list[float]](list)
            for _ in range(given.rounds):
                both = {
                    way: batch.measure(way == "in_flight", every * step, given.periods)
                    for way in ("waiting", "in_flight")
                }
                for way, figures in both.items():
                    for key, value in figures.items():
                        found[f"{way}_{key}"].append(value)
                speeds = [both[way]["tokens_per_second"] for way in ("in_flight", "waiting")]
                found["speed_ratio"].append(speeds[0] / speeds[1])
            figures = {"period_seconds": round(every * step, 3)}
            for key, values in found.items():
                figures |= spread(key, values, 2)
            told[str(every)] = figures
    return told


class SwappingEngine(NativeEngine):
    """Loads the policy after the one that it was given, in the middle of a batch."""

    _steps = 0
    _next: tuple[Path, int] | None = None

    def load_weights(self, folder: Path, policy: int) -> None:
        super().load_weights(folder, policy)
        after = folder.parent / str(policy + 1)
        self._steps, self._next = 0, (after, policy + 1) if after.is_dir() else None

    def step(self) -> list[Piece]:
        if self._next is not None and self._steps == SWAP_STEP:
            super().load_weights(*self._next)
            self._next = None
        self._steps += 1
        return super().step()


def learn(seeds: int, steps: int) -> dict[str, Any]:
    """Accuracies of the recipe after learning, with and without swaps."""
    told: dict[str, Any] = {"steps": steps}
    for name, engine in (("waiting", NativeEngine), ("in_flight", SwappingEngine)):
        runs = [run(seed, steps, engine=engine) for seed in range(seeds)]
        for field in ("sampled_accuracy_after", "greedy_accuracy_after"):
            told |= spread(f"{name}_{field}", [each[field] for each in runs])
    return told


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=["0.23", "20"])
    parser.add_argument("--every", type=several(at_least(1)), default=[64, 256, 1024])
    parser.add_argument("--rows", type=at_least(8), default=64)
    parser.add_argument("--periods", type=at_least(1), default=6)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--prompt", type=at_least(1), default=64)
    parser.add_argument("--limit", type=at_least(2), default=512)
    parser.add_argument("--learn", type=at_least(0), default=0, help="seeds of the demo's recipe")
    parser.add_argument("--learn-steps", type=at_least(1), default=250)
    given = parser.parse_args()
    torch.set_num_threads(1)
    told: dict[str, Any] = {**vars(given), "load_average": load_average()}
    for name in given.sizes:
        told[f"{name}M"] = measure_size(SIZES[name], given)
    if given.learn:
        told["learn"] = learn(given.learn, given.learn_steps)
    print_json(told)


if __name__ == "__main__":
    main()
