"""The engines on a GPU: generation, swaps, prefill, overhead and verification, with random weights.

`python -m benchmarks.accelerator` runs these parts, each in a process of its own. All figures are
medians over rounds with the least and the most; a round that is not counted comes first, in which
kernels are compiled and CUDA graphs recorded. Seconds are wall-clock seconds on a GPU, processor
seconds on a CPU. Groups of eight share prompts, every completion has the same length, and one
completion per slot is asked for.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import MODELS, make_policy
from benchmarks.spread import spread
from benchmarks.verification import handed_in, prove, timed
from peers.engines.batch import generate, requests_for
from peers.engines.device import find_device, find_dtype
from peers.engines.engine import Engine, Request
from peers.engines.native import NativeEngine
from peers.engines.registry import make_engine
from peers.validator.recompute import recompute
from swarm.errors import UserError
from swarm.jobs import Hardware
from swarm.manifest import Thresholds

GROUP = 8
KEY = (7, 8)


def make_requests(vocabulary: int, count: int, given: argparse.Namespace) -> list[Request]:
    """Requests for `count` completions, all with the same noise in every run."""
    drawn = random.Random(count)
    prompts = [
        [drawn.randrange(vocabulary) for _ in range(given.prompt)]
        for _ in range(-(-count // GROUP))
    ]
    rows = range(count)
    tokens = [prompts[row // GROUP] for row in rows]
    return requests_for(tokens, rows, KEY, 1.0, (), given.completion)


def native(
    folder: Path, batch: int, given: argparse.Namespace, graphs: bool = True
) -> NativeEngine:
    device = find_device(given.device)
    dtype = find_dtype(given.dtype, device)
    return NativeEngine(folder, device, dtype, slots=batch, memory_share=0.7, cuda_graphs=graphs)


def tokens_per_second(engine: Engine, requests: list[Request], rounds: int) -> dict[str, Any]:
    device = find_device(engine.capabilities.device)
    found = []
    for number in range(rounds + 1):
        made, seconds = timed(device, generate, engine, requests)
        if number:
            found.append(sum(len(piece.tokens) for piece in made) / seconds)
    return spread("tokens_per_second", found, 1)


def generation(name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The native engine by batch, with and without CUDA graphs."""
    told: dict[str, Any] = {}
    for batch in given.batches:
        requests = make_requests(MODELS[name]["vocab_size"], batch, given)
        for graphs in (True, False):
            engine = native(folder, batch, given, graphs)
            figures = tokens_per_second(engine, requests, given.rounds)
            if graphs:
                figures["graphs_recorded"] = engine._graphs.captures
                figures["graphs_replayed"] = engine._graphs.replays
            told[f"batch {batch}, {'graphs' if graphs else 'no graphs'}"] = figures
            del engine
    return told


def vllm(name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """vLLM by batch, with CUDA graphs. It needs an interpreter that has vLLM."""
    told: dict[str, Any] = {}
    hardware = Hardware(
        device=given.device,
        dtype=given.dtype,
        memory_share=0.8,
        length_max=given.prompt + given.completion,
        slots=max(given.batches),
        cuda_graphs="on",
    )
    try:
        engine = make_engine("vllm", folder, hardware)
    except UserError as error:
        return {"reason": str(error)}
    for batch in given.batches:
        requests = make_requests(MODELS[name]["vocab_size"], batch, given)
        told[f"batch {batch}"] = tokens_per_second(engine, requests, given.rounds)
    return told


def swap(name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Seconds to replace the weights by another policy's, read from the page cache."""
    engine = native(folder, 1, given)
    device, found = find_device(given.device), []
    for number in range(given.rounds + 1):
        seconds = timed(device, engine.load_weights, folder, number)[1]
        if number:
            found.append(seconds)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {**spread("seconds", found, 4), "bytes": size}


def prefill(name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Tokens prefilled per second, of sequences that share no prompt."""
    engine = native(folder, 1, given)
    drawn, length = random.Random(1), given.prompt + given.completion
    sequences = [
        [drawn.randrange(MODELS[name]["vocab_size"]) for _ in range(length)]
        for _ in range(max(given.batches))
    ]
    sampled = [range(given.prompt, length)] * len(sequences)
    device, found = find_device(given.device), []
    for number in range(given.rounds + 1):
        seconds = timed(device, engine.prefill, sequences, sampled)[1]
        if number:
            found.append(len(sequences) * length / seconds)
    return spread("tokens_per_second", found, 1)


def overhead(name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The share of generation that noise and proofs take; the aim is 0.01 for both together."""
    batch = max(given.batches)
    engine, device = native(folder, batch, given), find_device(given.device)
    noisy = make_requests(MODELS[name]["vocab_size"], batch, given)
    greedy = [replace(request, noise_key=None) for request in noisy]
    found = defaultdict[str, list[float]](list)
    for number in range(given.rounds + 1):
        without = timed(device, generate, engine, greedy)[1]
        made, seconds = timed(device, generate, engine, noisy)
        proving = timed(device, prove, made)[1]
        if number:
            found["noise_share"].append(1 - without / seconds)
            found["proofs_share"].append(proving / (proving + seconds))
    told: dict[str, Any] = {"batch": batch}
    for figure, values in found.items():
        told |= spread(figure, values, 5)
    return told


def verify(name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Generation with proofs over the validator's check of every token (`cheaper_at_1`)."""
    batch, thresholds = max(given.batches), Thresholds()
    engine, device = native(folder, batch, given), find_device(given.device)
    requests = make_requests(MODELS[name]["vocab_size"], batch, given)
    share = (thresholds.recompute_safety / thresholds.stake_steps) ** 0.5
    found = []
    for number in range(given.rounds + 1):
        made, generating = timed(device, generate, engine, requests)
        proofs, proving = timed(device, prove, made)
        submission = handed_in(requests, made, proofs)
        judged, checking = timed(device, recompute, engine, submission, KEY, 1.0, thresholds)
        if not all(chunk.accepted for chunk in judged.chunks):
            raise RuntimeError("an honest completion was refused")
        if number:
            found.append((generating + proving) / checking)
    return {
        **spread("cheaper_at_1", found),
        **spread("cheaper_at_default", [each / share for each in found]),
        "default_share": round(share, 4),
        "batch": batch,
    }


PARTS = {
    "generate": generation,
    "vllm": vllm,
    "swap": swap,
    "prefill": prefill,
    "overhead": overhead,
    "verify": verify,
}


def run_part(part: str, name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The figures of one part and model; the policy is written first, if `folder` is empty."""
    if not (folder / "config.json").exists():
        half = find_dtype(given.dtype, find_device(given.device)) == torch.bfloat16
        make_policy(name, given.device, half, folder)
        print(f"a policy of {name} is written", file=sys.stderr)
    return PARTS[part](name, folder, given)
