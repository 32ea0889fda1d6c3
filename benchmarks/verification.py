"""The prefill check of a validator against the generation of the same tokens.

    python -m benchmarks.verification --model SmolLM2-135M-Instruct --dtype bfloat16
    python -m benchmarks.verification --model Qwen/Qwen3-0.6B --device cuda --dtype bfloat16

Prints one JSON object. A model generates chats in
groups of eight on shared prompts, with lengths log-uniform between 1 and `--limit`, and builds
their proofs. Then `recompute`, the validator's own function, prefills them, verifies the proofs and
judges every token. `cheaper_at_1` is generation with proofs over that check, both from one round,
where every submission is recomputed. `cheaper_at_default` divides by the share for a worker that
hands in one submission a step, sqrt(safety / steps of its stake) with the default thresholds.

Seconds are processor seconds on a CPU, with one thread, and wall seconds on a GPU. Each figure is
the median of `--rounds` rounds, after one that does not count, with the least and the most.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import at_least, load_average, spread, timed_on
from benchmarks.engine import KEY, Prompts, chats, make_requests, prove
from peers.engines.batch import generate
from peers.engines.device import find_device, find_dtype
from peers.engines.engine import Piece, Request
from peers.engines.native import NativeEngine
from peers.models.find import find_model
from peers.proofs import toploc
from peers.validator.recompute import Completed, recompute
from swarm.terminal.output import print_json
from swarm.wire.manifest import Thresholds


def handed_in(
    requests: Sequence[Request], made: Sequence[Piece], proofs: Sequence[Sequence[bytes]]
) -> Completed:
    """What a validator reads in the submission."""
    sequences = [
        [*request.tokens, *piece.tokens] for request, piece in zip(requests, made, strict=True)
    ]
    return Completed(
        sequences=sequences,
        sampled=[
            range(len(request.tokens), len(tokens))
            for request, tokens in zip(requests, sequences, strict=True)
        ],
        rows=[request.row for request in requests],
        proofs=proofs,
    )


def measure(folder: Path, draw: Prompts, given: argparse.Namespace) -> dict[str, Any]:
    """Generate and check, repeatedly."""
    device = find_device(given.device)
    engine = NativeEngine(folder, device, find_dtype(given.dtype, device), slots=given.batch)
    requests = make_requests(draw, given.batch * given.waves, given.limit)
    thresholds = Thresholds()
    seconds = defaultdict[str, list[float]](list)
    for number in range(given.rounds + 1):
        made, generating = timed_on(device, generate, engine, requests)
        proofs, proving = timed_on(device, prove, made)
        submission = handed_in(requests, made, proofs)
        prefilling = timed_on(device, engine.prefill, submission.sequences, submission.sampled)[1]
        found, checking = timed_on(device, recompute, engine, submission, KEY, 1.0, thresholds)
        if not all(chunk.accepted for chunk in found.chunks):
            raise RuntimeError("an honest completion was refused")
        if number:
            seconds["generate_seconds"].append(generating)
            seconds["prove_seconds"].append(proving)
            seconds["prefill_seconds"].append(prefilling)
            seconds["check_seconds"].append(checking)
            seconds["cheaper_at_1"].append((generating + proving) / checking)
    told: dict[str, Any] = {"device": engine.capabilities.device, "rows": len(requests)}
    told["tokens"] = sum(len(piece.tokens) for piece in made)
    share = (thresholds.recompute_safety / thresholds.stake_steps) ** 0.5
    seconds["cheaper_at_default"] = [each / share for each in seconds["cheaper_at_1"]]
    for figure, values in seconds.items():
        told |= spread(figure, values, 3)
    return told | {"default_share": round(share, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder, a GGUF file, or a hub's name")
    parser.add_argument("--batch", type=at_least(8), default=16)
    parser.add_argument("--waves", type=at_least(1), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--limit", type=at_least(2), default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    torch.set_num_threads(1)
    toploc.build([torch.randn(32, 64).bfloat16()])  # builds the tables
    told: dict[str, Any] = {**vars(given), "load_average": load_average()}
    folder = find_model(given.model, "--model").folder
    print_json(told | measure(folder, chats(folder), given))


if __name__ == "__main__":
    main()
