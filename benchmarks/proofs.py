"""What proofs cost: ours against the toploc package's, and verification against generation.

    python -m benchmarks.proofs
    python -m benchmarks.proofs --tokens 512 --widths 512 --hidden 64 --layers 1

Prints one JSON object. Seconds are processor seconds of this process, all its threads together:
the median, minimum and maximum of `--repeats` runs in which both sides take turns.

`proofs`: building and verifying the proofs of `--tokens` tokens at each hidden width.
`build_ratio` and `verify_ratio` are our seconds divided by the package's, and null without it:

    pip install --no-binary toploc --no-build-isolation --no-deps --target FOLDER toploc==0.1.6
    PYTHONPATH=FOLDER:. python -m benchmarks.proofs

(three minutes and a C++ compiler; the published wheel does not fit our torch). With it, both sides
must give the same bytes.

`verification`: a random Qwen2 model generates completions with proofs. Then they are verified as a
validator does: one prefill, the proofs, and the seeded noise of every token. `share` is that work's
part of the generation's at share 1, where every submission is verified, and at
the share for a worker that hands in one submission a step, sqrt(safety / steps of its stake).
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.arguments import at_least, several
from benchmarks.spread import load_average, spread
from peers.engines.batch import generate as generate_batch
from peers.engines.batch import requests_for
from peers.engines.engine import Piece, Prefill
from peers.engines.native import NativeEngine
from peers.engines.sampling import gumbel_noise, judge_margins
from peers.proofs import toploc
from swarm.app.output import print_json
from swarm.messages import Thresholds

KEY = (11, 12)
PROMPT = list(range(1, 65))

T = TypeVar("T")


def timed(job: Callable[..., T], *arguments: Any) -> tuple[T, float]:
    """The result of a job and its processor seconds."""
    began = time.process_time()
    result = job(*arguments)
    return result, time.process_time() - began


def package() -> Any:
    """The toploc package; None if it is not installed."""
    try:
        return importlib.import_module("toploc")
    except ImportError:
        return None


def measure_proofs(tokens: int, width: int, repeats: int) -> dict[str, Any]:
    """Build and verify the proofs of random hidden states, ours and the package's in turn."""
    generator = torch.Generator().manual_seed(width)
    hidden = torch.randn(tokens, width, generator=generator).bfloat16()
    near = (hidden.float() * 1.004).bfloat16()
    theirs, seconds = package(), defaultdict[str, list[float]](list)

    def build() -> list[bytes]:
        return toploc.build(toploc.chunk_rows(hidden[:0], hidden))

    def verify(proofs: list[bytes]) -> list[toploc.ChunkResult]:
        return toploc.verify(toploc.chunk_rows(near[:0], near), proofs)

    def build_theirs() -> list[bytes]:
        made: list[bytes] = theirs.build_proofs_bytes(list(hidden), 32, 128, skip_prefill=True)
        return made

    def verify_theirs(proofs: list[bytes]) -> Any:
        return theirs.verify_proofs_bytes(near, proofs, 32, 128, skip_prefill=True)

    for _ in range(repeats):
        proofs, took = timed(build)
        seconds["build_seconds"].append(took)
        results, took = timed(verify, proofs)
        seconds["verify_seconds"].append(took)
        if not all(result.accepted for result in results):
            raise RuntimeError("an honest proof was refused")
        if theirs is not None:
            same, took = timed(build_theirs)
            seconds["package_build_seconds"].append(took)
            if same != proofs:
                raise RuntimeError("the package's proofs are others")
            _, took = timed(verify_theirs, proofs)
            seconds["package_verify_seconds"].append(took)
    told: dict[str, Any] = {}
    for name, values in seconds.items():
        told |= spread(name, values, 4)
    for name in ("build", "verify"):
        other = told.get(f"package_{name}_seconds")
        told[f"{name}_ratio"] = other and round(told[f"{name}_seconds"] / other, 3)
    return told


def model_in(folder: Path, hidden: int, layers: int) -> NativeEngine:
    """An engine with a random Qwen2 model."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        intermediate_size=hidden * 3,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return NativeEngine(folder)


def chunks_of(prompt_hidden: list[Tensor], hidden: list[Tensor]) -> list[Tensor]:
    """The chunks of all completions, in order."""
    return [
        chunk
        for before, rows in zip(prompt_hidden, hidden, strict=True)
        for chunk in toploc.chunk_rows(before, rows)
    ]


@torch.inference_mode()
def measure_verification(
    engine: NativeEngine, completions: int, new_tokens: int, repeats: int
) -> dict[str, Any]:
    """Generate with proofs and verify, repeatedly."""
    prompts, rows = [PROMPT] * completions, range(completions)
    stop_ids = [engine.capabilities.vocabulary_size - 1]
    seconds = defaultdict[str, list[float]](list)

    def generate() -> list[Piece]:
        requests = requests_for(prompts, rows, KEY, 1.0, stop_ids, new_tokens)
        return generate_batch(engine, requests)

    def prefill(tokens: list[list[int]]) -> Prefill:
        sequences = [[*PROMPT, *row] for row in tokens]
        return engine.prefill(
            sequences, [range(len(PROMPT), len(sequence)) for sequence in sequences]
        )

    def judge(tokens: list[list[int]], states: list[Tensor]) -> float:
        largest = 0.0
        for row, (drawn, own) in enumerate(zip(tokens, states, strict=True)):
            count = len(drawn)
            noise = gumbel_noise(
                KEY,
                torch.full((count,), row),
                torch.arange(count),
                engine.capabilities.vocabulary_size,
            )
            judgement = judge_margins(engine.logits(own), torch.tensor(drawn), 1.0, noise)
            largest = max(largest, float(judgement.margin.max()))
        return largest

    def build(made: list[Piece]) -> list[bytes]:
        before = [piece.prompt_hidden for piece in made]
        return toploc.build(chunks_of(before, [piece.hidden for piece in made]))

    def verify(again: Prefill, proofs: list[bytes]) -> list[toploc.ChunkResult]:
        return toploc.verify(chunks_of(again.prompt_hidden, again.hidden), proofs)

    for _ in range(repeats):
        made, took = timed(generate)
        seconds["generate_seconds"].append(took)
        proofs, took = timed(build, made)
        seconds["build_seconds"].append(took)
        tokens = [piece.tokens for piece in made]
        again, took = timed(prefill, tokens)
        seconds["prefill_seconds"].append(took)
        results, took = timed(verify, again, proofs)
        seconds["proofs_seconds"].append(took)
        margin, took = timed(judge, tokens, again.states)
        seconds["sampling_seconds"].append(took)
        if margin > 0.01 or not all(result.accepted for result in results):
            raise RuntimeError("an honest completion was refused")
    told: dict[str, Any] = {"tokens": sum(map(len, tokens))}
    for name, values in seconds.items():
        told |= spread(name, values, 3)
    verifying = ("prefill_seconds", "proofs_seconds", "sampling_seconds")
    share = [
        sum(seconds[name][run] for name in verifying)
        / (seconds["generate_seconds"][run] + seconds["build_seconds"][run])
        for run in range(repeats)
    ]
    thresholds = Thresholds()
    default = (thresholds.recompute_safety / thresholds.stake_steps) ** 0.5
    told |= spread("share_at_1", share) | {"default_share": default}
    return told | spread("share_at_default", [default * each for each in share], 4)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=at_least(32), default=4096)
    parser.add_argument("--widths", type=several(at_least(4)), default=[1024, 4096])
    parser.add_argument("--hidden", type=at_least(64), default=512)
    parser.add_argument("--layers", type=at_least(1), default=8)
    parser.add_argument("--completions", type=at_least(1), default=16)
    parser.add_argument("--new-tokens", type=at_least(1), default=128)
    parser.add_argument("--repeats", type=at_least(1), default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    told: dict[str, Any] = {**vars(given), "load_average": load_average()}
    toploc.build([torch.randn(32, 64).bfloat16()])  # builds the tables
    told["proofs"] = {
        str(width): measure_proofs(given.tokens, width, given.repeats) for width in given.widths
    }
    with tempfile.TemporaryDirectory(prefix="proofs-") as name:
        engine = model_in(Path(name), given.hidden, given.layers)
        told["verification"] = measure_verification(
            engine, given.completions, given.new_tokens, given.repeats
        )
    print_json(told)


if __name__ == "__main__":
    main()
