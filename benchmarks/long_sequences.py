"""Seconds and memory of one long sequence: its prefill and check, and a step of the trainer.

    python -m benchmarks.long_sequences --model SmolLM2-135M-Instruct
    python -m benchmarks.long_sequences --model SmolLM2-135M-Instruct --dtype bfloat16 --only step

Prints one JSON object. The prompt has an eighth of the tokens, all random. *prefill*: the native
engine's, then a validator's margins of every sampled token. *step*: log μ, forward, backward,
clipping, AdamW; `recomputed` with `activation_checkpointing`; `shared` by so many ranks over gloo
(`sequence_parallel`). Each part runs in processes of its own, with one thread. `peak_gb` is the
most memory that a process ever held, `before_gb` what it held when the measured part began: both
count torch, and the larger of two ranks is given. Seconds include waiting for busy cores;
`cpu_seconds` is the largest rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.common import at_least
from benchmarks.groups import Group, as_accepted
from peers.engines.native import NativeEngine
from peers.learning.learner import Learner
from peers.learning.ranks import Launch, Ranks
from peers.learning.settings import LearnerSettings
from peers.validator.recompute import judge_sampling
from swarm.jobs.training import Sharding
from swarm.rollouts.rollout import Rollout
from swarm.terminal.output import print_json
from swarm.wire.manifest import Objective, Schedule

PARTS: dict[str, Sharding | None] = {
    "prefill": None,
    "step": Sharding(),
    "step, recomputed": Sharding(activation_checkpointing=True),
    "step, shared": Sharding(sequence_parallel=2),
    "step, shared and recomputed": Sharding(sequence_parallel=2, activation_checkpointing=True),
}


class Stopwatch:
    """Measures from when it is made."""

    def __init__(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self._before = pages * resource.getpagesize()
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "seconds": round(time.perf_counter() - self._began, 2),
            "cpu_seconds": round(time.process_time() - self._cpu, 2),
            "before_gb": round(self._before / 1e9, 2),
            "peak_gb": round(peak / 1e9, 2),
        }


def prefill(given: argparse.Namespace, tokens: list[int], prompt: int) -> dict[str, Any]:
    engine = NativeEngine(given.model, dtype=getattr(torch, given.dtype))
    watch = Stopwatch()
    found = engine.prefill([tokens], [list(range(prompt, len(tokens)))])
    measured = watch.read()
    watch = Stopwatch()
    with torch.inference_mode():
        judge_sampling(engine, found, [tokens[prompt:]], [0], (1, 2), 1.0)
    return {**measured, "margins": watch.read()}


def step(given: argparse.Namespace, tokens: list[int], prompt: int) -> dict[str, Any]:
    """One process's part of a step on the sequence, which a group holds twice."""
    launch, ranks = Launch.here(), Ranks()
    if launch.world > 1:
        store = torch.distributed.FileStore(str(given.meeting), launch.world)  # type: ignore[attr-defined]
        ranks = Ranks.join(launch, store, torch.device("cpu"))
    how = PARTS[given.part]
    assert how is not None
    settings = LearnerSettings(
        Objective(kl_coefficient=0),
        Schedule(groups_per_step=1),
        sharding=msgspec.structs.replace(how, mixed_precision=given.dtype == "bfloat16"),
    )
    learner = Learner(given.model, settings, ranks)
    rollout = Rollout.single_turn(tokens[:prompt], tokens[prompt:])
    watch = Stopwatch()
    groups = as_accepted([Group([rollout, rollout], [0.0, 1.0], policy=0)], "", ranks)
    figures = learner.train_step(groups, 0)
    kept = {name: figures[name] for name in ("loss", "gradient_norm", "entropy")}
    return {**watch.read(), **kept}


def run(given: argparse.Namespace, part: str) -> dict[str, Any]:
    """Run a part in processes of its own; the larger figures of its ranks, and the load."""
    how = PARTS[part]
    world = how.sequence_parallel if how is not None else 1
    options = ["--model", str(given.model), "--tokens", str(given.tokens), "--dtype", given.dtype]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "meeting")
        command = [sys.executable, "-m", "benchmarks.long_sequences", *options, "--part", part]
        processes = [
            subprocess.Popen(
                [*command, "--meeting", str(meeting)],
                stdout=subprocess.PIPE,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)},
            )
            for rank in range(world)
        ]
        said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        return {"failed": [process.returncode for process in processes]}
    found = [json.loads(text) for text in said]
    most = {name: max(each[name] for each in found) for name in found[0] if name != "margins"}
    return {**found[0], **most, "load_before": round(load, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder")
    parser.add_argument("--tokens", type=at_least(16), default=8000)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--only", default="", help="parts whose names begin so")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--meeting", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part is None:
        parts = [part for part in PARTS if part.startswith(given.only)]
        found = {part: run(given, part) for part in parts}
        print_json({"tokens": given.tokens, "dtype": given.dtype, **found})
        return
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(32, 1024, (given.tokens,), generator=generator).tolist()
    does = step if PARTS[given.part] is not None else prefill
    print(json.dumps(does(given, tokens, given.tokens // 8)), flush=True)


if __name__ == "__main__":
    main()
