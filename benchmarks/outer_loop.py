"""Training of several trainers in turn in one process, through the same files as a run's.

`benchmarks.diloco` compares what it leads to. A character model of 31,000 parameters reads this
repository's text. It is trained alone first: an outer loop begins with weights that have left the
first, steep part of training (DiLoCo: after 24,000 steps).
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from peers.engines import model as policy_model
from peers.engines.demo import make_policy
from peers.engines.tokenizer import copy_tokenizer
from peers.outer.learning import contribution, state
from peers.outer.learning.corpus import Corpus, read_corpus
from peers.outer.learning.replica import Replica
from peers.outer.learning.state import Given, OuterOptimiser, StateFile
from peers.trainer.learning.ranks import Ranks
from peers.trainer.learning.stored import StoredWeights
from swarm.jobs.outer import Inner, StartReplica
from swarm.manifest import Compression, Optimiser

REPOSITORY = Path(__file__).parents[1]
TEXT = ("docs/*.md", "swarm/*.py", "peers/*.py")
PAGE_CHARACTERS = 1000
"""Text is shuffled in pages of this size, so that the text held back is like the rest."""

HELD_BACK = 256
"""Sequences to measure on."""

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 144,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "max_window_layers": 1,
}
"""What the model's configuration has instead of the demo's."""

PRETRAINING_RATE = 1e-2

PLAIN = OuterOptimiser(learning_rate=1.0, momentum=0.0)
"""The outer step that takes the mean of the inner weights as it is."""


@dataclass(frozen=True)
class Variant:
    """How the batches are divided and merged."""

    learning_rate: float
    """The inner optimiser's, at its highest."""
    inner_steps: int
    """Of a round."""
    compression: Compression = "fp32"
    outer: OuterOptimiser = PLAIN
    several: bool = True
    """Whether there are several trainers, or one."""
    whole_batch: bool = False
    """Whether the one trainer has the batch of all."""
    final_share: float = 0.0
    """Share of the learning rate at the end."""


@dataclass(frozen=True)
class Setting:
    """What all variants have in common, for one seed."""

    base: Path
    """The model to begin with."""
    corpus: Corpus
    seed: int
    trainers: int
    batch: int
    """Sequences of one trainer's step."""
    steps: int

    def replicas(self, variant: Variant) -> dict[str, Replica]:
        """The trainers of a variant."""
        names = tuple(f"trainer-{each}" for each in range(self.trainers if variant.several else 1))
        inner = Inner(
            batch_sequences=self.batch * (self.trainers if variant.whole_batch else 1),
            validation_sequences=HELD_BACK,
            optimiser=Optimiser(
                learning_rate=variant.learning_rate,
                beta2=0.95,
                gradient_norm_max=1.0,
                warmup_steps=20,
                learning_rate_schedule="wsd",
                final_learning_rate_share=variant.final_share,
            ),
        )
        jobs = {
            name: StartReplica(
                model=str(self.base),
                trainer=name,
                trainers=names,
                seed=self.seed,
                inner=inner,
                inner_steps=variant.inner_steps,
                rounds=self.steps // variant.inner_steps,
                compression=variant.compression,
            )
            for name in names
        }
        return {name: Replica(job, Ranks(), self.corpus) for name, job in jobs.items()}


@dataclass
class Outcome:
    """Figures of one training."""

    parameters: int
    loss: list[float] = field(default_factory=list)
    """On the text held back, before round 1 and after each round."""
    sent_bytes: int = 0
    """Sent by one trainer in all rounds."""
    digests: set[tuple[int, bytes]] = field(default_factory=set)
    """Round and digest of every state that a trainer merged: one a round if all agree."""


def read_text(folder: Path, characters: int, sequence_tokens: int) -> Corpus:
    """The first part of this repository's text, shuffled in pages."""
    listed = subprocess.check_output(["git", "ls-files", *TEXT], cwd=REPOSITORY, text=True)
    whole = "\n".join((REPOSITORY / name).read_text("utf-8") for name in listed.splitlines())
    pages = [
        whole[start : start + PAGE_CHARACTERS].lower()
        for start in range(0, len(whole), PAGE_CHARACTERS)
    ]
    random.Random(0).shuffle(pages)
    (folder / "text.txt").write_text("\n".join(pages)[:characters])
    make_policy(folder / "demo", positions=sequence_tokens)
    inner = Inner(data=[str(folder / "text.txt")], sequence_tokens=sequence_tokens)
    return read_corpus(inner, folder / "demo", 0)


def pretrain(setting: Setting, steps: int, folder: Path) -> None:
    """Write the model that all variants begin with to `folder`: of random weights, trained with the
    batch of all trainers at a constant rate. `setting.base` holds tokenizer and configuration."""
    config: dict[str, Any] = json.loads((setting.base / "config.json").read_text())
    drawn = folder.with_name(f"{folder.name}-drawn")
    drawn.mkdir()
    copy_tokenizer(setting.base, drawn)
    (drawn / "config.json").write_text(json.dumps(config | SIZES))
    policy_model.save(policy_model.random(drawn, setting.seed), drawn, drawn)
    variant = Variant(PRETRAINING_RATE, steps, several=False, whole_batch=True, final_share=1.0)
    # Another seed: another order of the text than in the training that follows.
    before = replace(setting, base=drawn, seed=setting.seed + 1000, steps=steps)
    (replica,) = before.replicas(variant).values()
    for _ in replica.steps(1):
        pass
    replica.policy.write(folder, replica.policy.snapshot())


def train(setting: Setting, variant: Variant) -> Outcome:
    """Train one variant."""
    replicas = setting.replicas(variant)
    first = next(iter(replicas.values()))
    with tempfile.TemporaryDirectory(prefix="swarm-diloco-") as folder:
        here = Path(folder)
        stored = StoredWeights(setting.base)
        shapes = first.shapes

        def weight_of(name: str) -> Any:
            return stored.part(name, tuple(slice(None) for _ in shapes[name]))

        state.begin(shapes, weight_of, here / "state-0")
        before = StateFile(here / "state-0")
        found = Outcome(sum(torch.Size(shape).numel() for shape in shapes.values()))
        found.loss.append(_measured(first, before))
        for round_ in range(1, setting.steps // variant.inner_steps + 1):
            given = [_give(here, name, each, before, round_) for name, each in replicas.items()]
            found.sent_bytes += given[0].path.stat().st_size
            # Each trainer merges by itself, what it has fetched in another order.
            for index in range(len(given)):
                order = given[index:] + given[:index]
                found.digests.add(
                    (round_, state.merge(before, order, variant.outer, here / f"state-{round_}"))
                )
            before = StateFile(here / f"state-{round_}")
            found.loss.append(_measured(first, before))
    return found


def _give(here: Path, name: str, replica: Replica, before: StateFile, round_: int) -> Given:
    """Train a round; write contribution and inner state."""
    inner = [here / f"{name}-{each}" for each in (round_ - 1, round_)]
    last = inner[0] if round_ > 1 else None
    replica.begin(before, last)
    tokens = sum(step.tokens for step in replica.steps(round_))
    replica.write(before, last, inner[1], here / f"{name}-given")
    shutil.rmtree(inner[0], ignore_errors=True)
    return Given(name, tokens, here / f"{name}-given" / contribution.FILE)


def _measured(replica: Replica, outer: StateFile) -> float:
    loss = replica.measure(outer)
    assert loss is not None
    return loss
