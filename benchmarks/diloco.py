"""Several trainers with an outer loop, against synchronous training and one trainer alone.

    python -m benchmarks.diloco --seeds 3 --rounds 100 --rates 1e-2

A run's trainers, in turn in one process. A character model of 31,000 parameters reads Python's
standard library; first alone, since an outer loop begins with weights that have left the steep part
(DiLoCo, arXiv 2311.08105). Then each variant takes as many steps: warm-up, constant rate, decay to
0 over the last fifth. Prints one JSON object: by variant and inner rate the loss on text held back
before round 1 and after each, in nats per token, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
from msgspec.structs import replace

from benchmarks.common import at_least, several, spread
from peers.engines import loading, model
from peers.engines.demo import make_policy
from peers.learning.ranks import Ranks
from peers.outer.learning import contribution, state
from peers.outer.learning.corpus import TextBlocks
from peers.outer.learning.replica import Replica
from peers.outer.learning.state import Given, OuterOptimiser, StateFile
from swarm.jobs.outer import Inner, StartReplica
from swarm.terminal.output import print_json
from swarm.wire.manifest import Optimiser

SIZES = {"hidden_size": 48, "intermediate_size": 144, "num_hidden_layers": 1}
LAYERS = {"layer_types": ["full_attention"], "max_window_layers": 1}
WIDTH, PAGE, CHARACTERS = 65, 1000, 8_000_000
"""Tokens of a sequence, and characters of a page: shuffled, so what is held back is like the rest;
and of all text."""
OPTIMISER = Optimiser(
    beta2=0.95, gradient_norm_max=1.0, warmup_steps=20, learning_rate_schedule="wsd"
)
PLAIN = OuterOptimiser(learning_rate=1.0, momentum=0.0)
VARIANTS = {
    "synchronous": (1, 32, PLAIN),
    "outer": (4, 8, OuterOptimiser()),
    "mean": (4, 8, PLAIN),
    "alone": (1, 8, PLAIN),
}
"""Trainers, sequences of a trainer's batch, and the outer optimiser."""


def write_text(path: Path) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(each.relative_to(library) for each in library.rglob("*.py"))
    files = [each for each in files if not {"site-packages", "test", "tests"} & set(each.parts)]
    text = "\n".join((library / each).read_text("utf-8", "replace") for each in files).lower()
    pages = [text[start : start + PAGE] for start in range(0, len(text), PAGE)]
    random.Random(0).shuffle(pages)
    path.write_text("".join(pages)[:CHARACTERS], "utf-8")


def train(job: StartReplica, corpus: TextBlocks, name: str, policy: Path) -> list[float]:
    """Train a variant; the loss before round 1 and after each. The first trainer's last inner
    weights go to the folder `policy`."""
    trainers, batch, outer = VARIANTS[name]
    names = tuple(f"trainer-{each}" for each in range(trainers))
    compression = "int8" if trainers > 1 else "fp32"
    inner = replace(job.inner, batch_sequences=batch)
    job = replace(job, trainers=names, inner=inner, compression=compression)
    replicas = [Replica(replace(job, trainer=each), Ranks(), corpus) for each in names]
    first = replicas[0]
    weights = {name: each.detach() for name, each in first.policy.trained().items()}
    with tempfile.TemporaryDirectory(prefix="swarm-diloco-") as folder:
        here = Path(folder)
        state.begin(first.shapes, weights.__getitem__, here / "0")
        before = StateFile(here / "0")
        losses = [first.measure(before) or 0.0]
        for round_ in range(1, job.rounds + 1):
            given = []
            for trainer, replica in zip(names, replicas, strict=True):
                last = here / f"{trainer}-{round_ - 1}" if round_ > 1 else None
                to = here / f"{trainer}-given"
                replica.begin(before, last)
                tokens = sum(replica.predicted(batch) for _ in replica.steps(round_))
                replica.write(before, last, here / f"{trainer}-{round_}", to)
                given.append(Given(trainer, tokens, to / contribution.FILE))
            if round_ == job.rounds:
                first.policy.write(policy, first.policy.snapshot())
            state.merge(before, given, outer, here / str(round_))
            before = StateFile(here / str(round_))
            losses.append(first.measure(before) or 0.0)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=at_least(1), default=1, help="how many seeds, from 0")
    parser.add_argument("--rounds", type=at_least(1), default=100)
    parser.add_argument("--inner-steps", type=at_least(1), default=25)
    parser.add_argument("--pretraining-steps", type=at_least(1), default=1000)
    parser.add_argument("--rates", type=several(float), default=[1e-2], help="of inner steps")
    parser.add_argument("--variants", type=several(str), default=list(VARIANTS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    curves: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="swarm-diloco-") as name:
        folder = Path(name)
        make_policy(folder / "demo", positions=WIDTH)
        config = json.loads((folder / "demo" / "config.json").read_text()) | SIZES | LAYERS
        (folder / "demo" / "config.json").write_text(json.dumps(config))
        write_text(folder / "text.txt")
        inner = Inner(
            data=[str(folder / "text.txt")], sequence_tokens=WIDTH, validation_sequences=256
        )
        corpus = TextBlocks(inner, folder / "demo")

        def job(
            base: Path, seed: int, rate: float, last: float, rounds: int, steps: int
        ) -> StartReplica:
            optimiser = replace(OPTIMISER, learning_rate=rate, final_learning_rate_share=last)
            return StartReplica(
                model=str(base),
                trainer="",
                seed=seed,
                inner=replace(inner, optimiser=optimiser),
                inner_steps=steps,
                rounds=rounds,
                compression="int8",
            )

        for seed in range(given.seeds):
            drawn, base = folder / f"drawn-{seed}", folder / f"base-{seed}"
            model.save(loading.random(folder / "demo", seed), drawn, folder / "demo")
            # Another seed: another order of the text than afterwards.
            train(
                job(drawn, seed + 1000, 1e-2, 1.0, 1, given.pretraining_steps),
                corpus,
                "synchronous",
                base,
            )
            for rate in given.rates:
                for name in given.variants:
                    losses = train(
                        job(base, seed, rate, 0.0, given.rounds, given.inner_steps),
                        corpus,
                        name,
                        folder / "trained",
                    )
                    curves.setdefault(f"{name}, {rate:g}", []).append(losses)
                    shown = " ".join(f"{loss:.3f}" for loss in losses[:: given.rounds // 10 or 1])
                    took = f"{time.process_time():.0f} s of CPU"
                    print(
                        f"seed {seed}, {name}, {rate:g}: {shown}; {took}",
                        file=sys.stderr,
                        flush=True,
                    )
    ends = {name: spread("loss", [each[-1] for each in found]) for name, found in curves.items()}
    print_json({**vars(given), "ends": ends, "curves": curves})


if __name__ == "__main__":
    main()
