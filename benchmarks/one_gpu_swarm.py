"""A swarm on one GPU: a worker, a validator and a trainer share it for some steps.

`python -m benchmarks.accelerator --swarm` runs it, with the demo's task and a small policy. Every
peer is a process of its own on loopback; the worker generates with vLLM where the peers' home has
it, and natively otherwise.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import trio

from benchmarks.spread import spread
from peers.demo.recipes import ENVIRONMENT
from peers.engines.demo import save_tokenizer
from peers.engines.vllm.selftest import make_tiny
from peers.environments import load
from peers.trainer.warmup import Warmup, warm_up
from tests.end_to_end.harness import Swarm, running_fork_server, swarm

NAMES = ["bootstrap", "trainer", "validator", "inference-1"]

LOADED_SECONDS = 240.0
"""Deadline for the first policy: CUDA and vLLM start slowly."""

STEP_SECONDS = 60.0


def run_swarm(given: argparse.Namespace) -> dict[str, Any]:
    """Run it; the figures of its steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Heads of 32 values, which vLLM takes, in a policy that sometimes solves the demo's task.
        make_tiny(folder / "base", seed=0, hidden=128, tied=True, spread=0.02)
        save_tokenizer(folder / "base")
        task = load(ENVIRONMENT.name, ENVIRONMENT.version)
        warm_up(folder / "base", [task], 0, Warmup(accuracy=0.05))
        with running_fork_server(folder) as fork_server:
            return trio.run(_main, folder, fork_server, given)


async def _main(folder: Path, fork_server: Path, given: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, dict[str, Any]] = {
        name: {"device": given.device, "dtype": given.dtype} for name in NAMES[1:]
    }
    settings["inference-1"]["memory_share"] = 0.3
    base = folder / "base"
    async with swarm(
        folder / "peers", base, fork_server, names=NAMES, steps=given.swarm_steps, settings=settings
    ) as peers:
        if given.engines:
            worker = peers["inference-1"]
            (worker.home / "engines").symlink_to(given.engines)
            worker.command = [*worker.command, "--engine", "vllm"]
        began = time.monotonic()
        await peers.start()
        await peers["inference-1"].says("inference.policy_loaded", seconds=LOADED_SECONDS)
        await peers.complete(given.swarm_steps * STEP_SECONDS)
        return {"seconds": round(time.monotonic() - began, 1), **_figures(peers)}


def _figures(peers: Swarm) -> dict[str, Any]:
    steps = peers["trainer"].heard("trainer.step_trained")
    receipts = peers["inference-1"].heard("inference.receipt")
    outcomes = [receipt["outcome"] for receipt in receipts]
    return {
        "steps": len(steps),
        "receipts": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        **spread("step_seconds", [step["step_seconds"] for step in steps]),
        **spread("train_seconds", [step["train_seconds"] for step in steps]),
    }
