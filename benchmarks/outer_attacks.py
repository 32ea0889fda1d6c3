"""What attackers reach in an outer loop that admits strangers by their scores.

    python -m benchmarks.outer_attacks --rounds 50 --seed 0

A run's trainers and strangers, in turn in one process, with the files, scores, ratings and merge
of a run. The demo's model (0.23 million parameters) reads Python's standard library; first alone,
since an outer loop begins with weights that have left the steep part. Two trainers and five honest
strangers, then the same with three attackers of ten (`GROUPS`), or with one that has twenty keys.
Prints a JSON object per ten rounds, and for each stranger at the end its mean figures: influence
is the norm of its part of the mean over the mean's, `of_ideal` its weight over the most possible.
Last come quantiles of the cosines of every two honest contributions of a round.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sysconfig
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from msgspec.structs import replace
from torch import Tensor

from benchmarks.common import at_least
from peers.engines.demo import make_policy
from peers.learning.ranks import Ranks
from peers.outer.learning import contribution, state
from peers.outer.learning.contribution import Contribution, write_values
from peers.outer.learning.corpus import TextBlocks
from peers.outer.learning.replica import Replica
from peers.outer.learning.scoring import score
from peers.outer.learning.state import Given, OuterOptimiser, StateFile, shares
from peers.outer.rating import assignment, rate, weight
from swarm.jobs.outer import Inner, Offered, ScoreRound, StartReplica
from swarm.wire.manifest import Optimiser
from swarm.wire.outer import SCORE_MAX, Rated

WIDTH, PAGE, CHARACTERS, BATCH, SHARE = 65, 1000, 2_000_000, 4, 0.5
NAMED, HONEST = ("named-0", "named-1"), tuple(f"honest-{each}" for each in range(5))
GROUPS = {"none": "", "a": "garbage copied flipped", "b": "scaled other-data lazy"}
GROUPS["keys"] = " ".join(f"key-{each:02}" for each in range(20))
QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)
OPTIMISER = Optimiser(learning_rate=3e-3, beta2=0.95, gradient_norm_max=1.0, warmup_steps=20)


def write_text(path: Path, root: Path, pattern: str) -> str:
    """Text in shuffled pages, so that what is held back is like the rest."""
    files = [each for each in sorted(root.rglob(pattern)) if "site-packages" not in each.parts]
    text = "\n".join(each.read_text("utf-8", "replace") for each in files).lower()
    found = [text[start : start + PAGE] for start in range(0, len(text), PAGE)]
    random.Random(0).shuffle(found)
    path.write_text("".join(found)[:CHARACTERS], "utf-8")
    return str(path)


class Swarm:
    """The peers of one run; strangers take turns on one replica."""

    def __init__(self, folder: Path, job: StartReplica, other: str) -> None:
        self.folder, self.job = folder, job
        corpus = TextBlocks(job.inner, Path(job.model))
        named = {each: replace(job, trainer=each, trainers=NAMED) for each in NAMED}
        self.replicas = {each: Replica(one, Ranks(), corpus) for each, one in named.items()}
        self.stranger = Replica(job, Ranks(), corpus)
        elsewhere = replace(job.inner, data=[other], validation_sequences=0)
        self.replicas["other-data"] = Replica(replace(job, inner=elsewhere), Ranks())
        self.shapes = self.stranger.shapes
        self.rated: list[Rated] = []
        self.made: dict[str, Path] = {}
        self.generator = torch.Generator().manual_seed(job.seed)
        self.cosines: list[Tensor] = []
        """Of every two honest contributions, for each round."""

    def train(self, name: str, round_: int, before: StateFile, seed: int | None) -> Path:
        """A peer's contribution by its inner steps; the lazy one takes one."""
        replica = self.replicas.get(name, self.stranger)
        last = self.folder / f"inner-{name}-{round_ - 1}" if round_ > 1 else None
        replica.begin(before, last)
        list(islice(replica.steps(round_, seed), 1 if name == "lazy" else None))
        replica.write(before, last, self.folder / f"inner-{name}-{round_}", self.folder / name)
        shutil.rmtree(last or "", ignore_errors=True)
        return self.folder / name

    def values(self, name: str) -> Tensor:
        with Contribution(self.made[name] / contribution.FILE, self.shapes) as file:
            return file.values()

    def noise(self, like: Tensor) -> Tensor:
        drawn = torch.randn(len(like), generator=self.generator)
        return drawn.mul_(like.norm() / drawn.norm())

    def contribute(self, name: str, round_: int, before: StateFile, seed: int | None) -> None:
        """Make a peer's contribution, after those of the peers before it in the list."""
        copies = {"garbage": HONEST[0], "copied": HONEST[0]}
        copied = copies.get(name, "key-00" if "key-00" < name <= "key-99" else name)
        if copied == name:
            self.made[name] = self.train(name, round_, before, seed)
        if name in ("flipped", "scaled") or copied != name:
            work = self.values(copied)
            noisy = 1.0 if name >= "key-10" else 0.1  # half of the keys hide it in as much noise
            made = {"flipped": -work, "scaled": 100 * work, "garbage": self.noise(work)}
            changed = made.get(name, work + noisy * self.noise(work))
            self.made[name] = self.folder / f"made-{name}"
            self.made[name].mkdir(exist_ok=True)
            write_values(changed, self.shapes, self.made[name] / contribution.FILE)

    def round(self, round_: int, strangers: tuple[str, ...], before: StateFile) -> dict[str, Any]:
        """Contribute, score, rate and merge; the figures of each stranger."""
        base, everybody = before.digest(), NAMED + strangers
        tokens = self.job.inner_steps * self.stranger.predicted(BATCH)
        seeds = {name: assignment("run", round_, base, name) for name in strangers}
        for name in everybody:
            self.contribute(name, round_, before, seeds.get(name))
        files = {name: self.made[name] / contribution.FILE for name in everybody}
        digests = [blake3(each.read_bytes()).digest() for each in files.values()]
        job = ScoreRound(
            state=str(before.path.parent),
            named=[str(self.made[name]) for name in NAMED],
            strangers=[
                Offered(trainer=name, folder=str(self.made[name]), tokens=tokens, seed=seeds[name])
                for name in strangers
            ],
            draw=blake3(b"".join(digests)).digest(),
        )
        scored = {each.trainer: each for each in score(self.replicas[NAMED[0]], job)}
        scores = {name: (each.gain, each.own) for name, each in scored.items()}
        self.rated = rate(self.rated, scores)
        weights = {each.trainer: weight(each) for each in self.rated}
        listed = sorted(name for name in everybody if weights.get(name, 1.0))
        norms = [float(self.values(name).norm()) for name in listed]
        sizes = zip(listed, norms, strict=True)
        given = [Given(each, tokens, files[each], norm, weights.get(each)) for each, norm in sizes]
        after = self.folder / f"state-{round_ % 2}"
        after.mkdir(exist_ok=True)
        state.merge(before, given, OuterOptimiser(), after / state.FILE, SHARE)
        by = shares([tokens] * len(given), norms, [each.weight for each in given], SHARE)
        parts = {name: self.values(name) * part for name, part in zip(listed, by, strict=True)}
        whole, found = sum(parts.values(), torch.zeros(1)).norm(), {}
        flat = torch.stack([self.values(name) for name in everybody])
        honest = torch.nn.functional.normalize(flat[: len(NAMED + HONEST)])
        above = torch.triu_indices(len(honest), len(honest), 1)
        self.cosines.append((honest @ honest.T)[above[0], above[1]])
        alike = torch.corrcoef(flat).abs().tril(-1).max(1).values  # with those before it
        for name, each, cosine in zip(strangers, scored.values(), alike[2:].tolist(), strict=True):
            influence = float(parts[name].norm() / whole) if name in parts else 0.0
            found[name] = {"gain": each.gain / 1000, "own": each.own / 1000, "share": each.share}
            part = {"weight": weights.get(name, 0.0), "influence": influence}
            found[name] |= {"cosine": cosine, **part}
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=at_least(1), default=50)
    parser.add_argument("--inner-steps", type=at_least(1), default=8)
    parser.add_argument("--pretraining-steps", type=at_least(1), default=300)
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    ideal, best = 0.0, list[Rated]()
    for _ in range(given.rounds):
        best = rate(best, {"best": (SCORE_MAX, SCORE_MAX)})
        ideal += weight(best[0]) / given.rounds
    with tempfile.TemporaryDirectory(prefix="swarm-attacks-") as temporary:
        folder = Path(temporary)
        make_policy(folder / "demo", given.seed, positions=WIDTH)
        text = write_text(folder / "text.txt", Path(sysconfig.get_path("stdlib")), "*.py")
        other = write_text(folder / "other.txt", Path(__file__).parents[1] / "docs", "*.md")
        sizes: Any = {"sequence_tokens": WIDTH, "batch_sequences": BATCH}
        inner = Inner(data=[text], validation_sequences=256, optimiser=OPTIMISER, **sizes)
        counts = {"inner_steps": given.inner_steps, "rounds": given.rounds, "seed": given.seed}
        named: Any = {"model": str(folder / "demo"), "trainer": "stranger", "compression": "int8"}
        job = StartReplica(inner=inner, **named, **counts)
        alone = replace(inner, batch_sequences=8 * BATCH)
        steps, seed = given.pretraining_steps, given.seed + 1000
        first = Replica(replace(job, inner=alone, inner_steps=steps, seed=seed), Ranks())
        list(first.steps(1))
        weights = {name: each.detach() for name, each in first.policy.trained().items()}
        for group in given.groups:
            swarm, found = Swarm(folder / group, job, other), list[dict[str, Any]]()
            (folder / group / "state-0").mkdir(parents=True)
            state.begin(first.shapes, weights.__getitem__, folder / group / "state-0" / state.FILE)
            for round_ in range(1, given.rounds + 1):
                before = StateFile(folder / group / f"state-{1 - round_ % 2}" / state.FILE)
                found.append(swarm.round(round_, HONEST + tuple(GROUPS[group].split()), before))
                if round_ % 10 == 0 or round_ == given.rounds:
                    after = StateFile(folder / group / f"state-{round_ % 2}" / state.FILE)
                    told = {"loss": swarm.stranger.measure(after), "cpu": time.process_time()}
                    print(json.dumps({"group": group, "round": round_, **told}), flush=True)
            for name in HONEST + tuple(GROUPS[group].split()):
                each = [one[name] for one in found]
                mean = {key: round(sum(one[key] for one in each) / len(each), 4) for key in each[0]}
                mean["influence_most"] = round(max(one["influence"] for one in each), 4)
                mean["of_ideal"] = round(mean["weight"] / ideal, 4)
                print(json.dumps({"group": group, "peer": name, **mean}), flush=True)
            found_cosines = torch.cat(swarm.cosines)
            at = {f"q{each}": float(found_cosines.quantile(each)) for each in QUANTILES}
            print(json.dumps({"group": group, "cosines": len(found_cosines), **at}), flush=True)


if __name__ == "__main__":
    main()
