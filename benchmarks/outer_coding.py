"""What the rounding of a shard's mean costs in loss.

    python -m benchmarks.outer_coding --rounds 50 --seeds 0 1 2

Trainers of one run, in turn in one process, with a run's files and merge: the demo's model (0.23
million parameters) reads Python's standard library, first alone, since an outer loop begins with
weights that have left the steep part. `whole`: contributions in int8, one mean of all values that
nobody rounds. `shards`: a shard per trainer, each mean rounded to int8. `fp32`: neither
contribution nor mean is rounded. All variants of a seed begin with the same weights, and their
trainers learn the same sequences. Prints a JSON object per ten rounds with the held-back loss, in
nats per token, and the mean relative error of a rounded mean, and at the end the differences to
`whole`.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.common import at_least
from benchmarks.outer_attacks import OPTIMISER, write_text
from peers.engines.demo import make_policy
from peers.learning.ranks import Ranks
from peers.outer.learning import contribution, state
from peers.outer.learning.contribution import Contribution, Header
from peers.outer.learning.corpus import TextBlocks
from peers.outer.learning.replica import Replica
from peers.outer.learning.state import Given, OuterOptimiser, StateFile
from swarm.jobs.outer import Inner, StartReplica
from swarm.wire.manifest import Compression

WIDTH, BATCH, HELD_BACK = 65, 4, 512
VARIANTS: dict[str, Compression] = {"whole": "int8", "shards": "int8", "fp32": "fp32"}


def run(folder: Path, job: StartReplica, weights: dict[str, Any], shards: int) -> list[float]:
    """All rounds of one variant; the held-back losses after every tenth, and prints them."""
    corpus = TextBlocks(job.inner, Path(job.model))
    mine = {each: replace(job, trainer=each, shards=shards) for each in job.trainers}
    replicas = {each: Replica(one, Ranks(), corpus) for each, one in mine.items()}
    measured = next(iter(replicas.values()))
    shapes, tokens = measured.shapes, job.inner_steps * measured.predicted(BATCH)
    (folder / "state-0").mkdir(parents=True)
    state.begin(shapes, weights.__getitem__, folder / "state-0" / state.FILE)
    losses, errors = [], []
    for round_ in range(1, job.rounds + 1):
        before = StateFile(folder / f"state-{1 - round_ % 2}" / state.FILE)
        after = folder / f"state-{round_ % 2}" / state.FILE
        after.parent.mkdir(exist_ok=True)
        for name, replica in replicas.items():
            last = folder / f"inner-{name}-{1 - round_ % 2}" if round_ > 1 else None
            replica.begin(before, last)
            list(replica.steps(round_))
            replica.write(before, last, folder / f"inner-{name}-{round_ % 2}", folder / name)

        def given(shard: int) -> list[Given]:
            return [
                Given(name, tokens, contribution.place(folder / name, shard, shards))
                for name in replicas
            ]

        if shards == 1:
            state.merge(before, given(0), OuterOptimiser(), after)
        else:
            means = [folder / f"mean-{shard}" for shard in range(shards)]
            for shard, path in enumerate(means):
                header = Header(job.compression, list(shapes.items()), shard, shards)
                state.merge_shard(given(shard), shapes, header, path)
                errors.append(rounding(given(shard), path, header))
            state.apply(before, means, OuterOptimiser(), after)
        if round_ % 10 == 0 or round_ == job.rounds:
            loss = measured.measure(StateFile(after))
            assert loss is not None
            losses.append(loss)
            told: dict[str, Any] = {"variant": folder.name, "seed": job.seed, "round": round_}
            if errors:
                told["error"] = round(fmean(errors), 5)
            print(json.dumps({**told, "loss": round(loss, 4)}), flush=True)
    return losses


def rounding(given: list[Given], path: Path, header: Header) -> float:
    """The relative error of the mean of a shard in its file."""
    shapes = dict(header.tensors)
    place = header.shard, header.shards
    with state.mean_of(given, shapes, *place) as exact, Contribution(path, shapes, *place) as file:
        wanted = torch.cat([exact(*piece) for piece in file.cut])
        return float((file.values() - wanted).norm() / wanted.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=at_least(1), default=50)
    parser.add_argument("--inner-steps", type=at_least(1), default=8)
    parser.add_argument("--pretraining-steps", type=at_least(1), default=300)
    parser.add_argument("--trainers", type=at_least(2), default=4)
    parser.add_argument("--seeds", type=at_least(0), nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = tuple(f"trainer-{each}" for each in range(given.trainers))
    for seed in given.seeds:
        with tempfile.TemporaryDirectory(prefix="swarm-coding-") as temporary:
            folder = Path(temporary)
            make_policy(folder / "demo", seed, positions=WIDTH)
            text = write_text(folder / "text.txt", Path(sysconfig.get_path("stdlib")), "*.py")
            sizes: Any = {"sequence_tokens": WIDTH, "batch_sequences": BATCH}
            inner = Inner(data=[text], validation_sequences=HELD_BACK, optimiser=OPTIMISER, **sizes)
            counts = {"inner_steps": given.inner_steps, "rounds": given.rounds, "seed": seed}
            job = StartReplica(
                model=str(folder / "demo"),
                trainer=names[0],
                trainers=names,
                inner=inner,
                compression="int8",
                **counts,
            )
            alone = replace(inner, batch_sequences=8 * BATCH)
            steps = {"inner_steps": given.pretraining_steps, "seed": seed + 1000}
            first = Replica(replace(job, inner=alone, trainers=(), **steps), Ranks())
            list(first.steps(1))
            weights = {name: each.detach() for name, each in first.policy.trained().items()}
            losses = {
                name: run(
                    folder / name,
                    replace(job, compression=compression),
                    weights,
                    given.trainers if name == "shards" else 1,
                )
                for name, compression in VARIANTS.items()
            }
            for name in ("shards", "fp32"):
                differences = zip(losses[name], losses["whole"], strict=True)
                told = [round(ours - whole, 4) for ours, whole in differences]
                print(json.dumps({"seed": seed, f"{name} minus whole": told}), flush=True)


if __name__ == "__main__":
    main()
