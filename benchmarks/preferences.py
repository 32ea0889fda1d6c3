"""DPO and rejection sampling on a policy's own answers: which settings improve its accuracy?

    python -m benchmarks.preferences --policy student --seeds 3

For each seed the policy answers training tasks of sort-digits several times (`swarm synthesize`).
DPO learns each task's best answer against its worst; rejection sampling learns the right answers by
SFT. Prints one JSON object: the policy's sampled accuracy on held-out prompts, and that of each
result as median, least and most, with DPO's share of held-back pairs that are preferred. Nothing
here uses a network.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trio
from msgspec.structs import replace

from benchmarks.arguments import at_least
from benchmarks.commands import accuracy, spread, swarm
from peers.demo.recipes import ENVIRONMENT
from peers.tuning.service import Tuning
from swarm.jobs.offline import Reading, StartTuning, Tune, TuningSettings, Validate
from swarm.jobs.training import Export
from swarm.terminal.output import print_json

PROMPTS = 512
"""Held-out prompts that measure a policy."""

EVERY, RIGHT = Reading(), Reading(reward=(1.0, math.inf))
DPO = TuningSettings(loss="preferences", learning_rate=1e-4)
SFT = TuningSettings(learning_rate=1e-4)


@dataclass(frozen=True)
class Way:
    """One way to learn from a policy's answers."""

    settings: TuningSettings
    reading: Reading = EVERY


WAYS = {
    "dpo": Way(DPO),
    "dpo, learning rate 1e-5": Way(replace(DPO, learning_rate=1e-5)),
    "dpo, answer weight 10": Way(replace(DPO, answer_weight=10.0)),
    "dpo, answer weight 30, learning rate 3e-4": Way(
        replace(DPO, answer_weight=30.0, learning_rate=3e-4)
    ),
    "rejection sampling": Way(replace(SFT, learning_rate=3e-4), RIGHT),
}


def tune(policy: Path, data: Path, way: Way, settings: TuningSettings) -> dict[str, float]:
    """Learn in one way; return the figures of the result."""
    service = Tuning()

    async def learn(out: Path) -> dict[str, float]:
        job = StartTuning(model=str(policy), data=str(data), settings=settings, reading=way.reading)
        examples = (await service.start(job)).examples
        for _ in range(settings.steps):
            await service.step(Tune())
        held_back = await service.validate(Validate())
        await service.save(Export(folder=str(out)))
        found = {"accuracy": accuracy(out, prompts=PROMPTS), "examples": float(examples)}
        if held_back.preferred is not None:
            found["preferred"] = held_back.preferred
        return found

    with tempfile.TemporaryDirectory() as name:
        return trio.run(learn, Path(name) / "result")


def compare(seed: int, given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """All ways on one seed's answers."""
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "own"
        asked = ["--tasks", ENVIRONMENT.name, "--limit", given.tasks, "--samples", 6]
        asked += ["--max-new-tokens", 8, "--seed", seed, "--reward", "0:", "--per-task", 6]
        swarm("synthesize", "--teacher", given.policy, "--out", data, *asked)
        found = {}
        for label, way in WAYS.items():
            settings = replace(way.settings, seed=seed, steps=given.steps)
            found[label] = tune(given.policy, data, way, settings)
            print(f"seed {seed}: {label}: {found[label]}", file=sys.stderr, flush=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    whole = at_least(1)
    parser.add_argument("--policy", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--seeds", type=whole, default=3)
    parser.add_argument("--tasks", type=whole, default=512, help="training tasks to answer")
    parser.add_argument("--steps", type=whole, default=60, help="of 32 pairs or answers each")
    given = parser.parse_args()
    torch.set_num_threads(1)
    before = accuracy(given.policy, prompts=PROMPTS)
    runs = [compare(seed, given) for seed in range(1, given.seeds + 1)]
    told: dict[str, Any] = {
        label: {figure: spread([run[label][figure] for run in runs]) for figure in runs[0][label]}
        for label in WAYS
    }
    print_json({"before": round(before, 4), "steps": given.steps, "after": told})


if __name__ == "__main__":
    main()
