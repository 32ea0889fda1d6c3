"""The native engine against transformers' generate, and vLLM, on the same requests.

    python -m benchmarks.engine
    python -m benchmarks.engine --sizes 0.23 --batches 16 --rounds 3 --vllm ENV/bin/python

Prints one JSON object. One thread. Models have random weights and Qwen2's shape. Requests are
groups of eight on prompts of `--prompt` tokens, with lengths log-uniform between 1 and `--limit`,
and `--waves` times as many as the batch. All engines see the same requests in the same order:

- `native` has as many slots as the batch, and refills them; `plain` is the same without noise.
  `proofs_share` and `noise_share` are what proofs and noise add, over the time of `native`;
- `hf` is transformers' `generate` with sampling, a static batch at a time, which waits for its
  longest completion (a stopping criterion ends each row at its length);
- `vllm`, with `--vllm PYTHON`, is the engine `vllm` under that interpreter (see
  `swarm engine install`).

`equal` has one batch in which all lengths are 64: nothing is gained there by refilling.

Seconds are processor seconds, so that other programs disturb them less. Each figure is the median
of `--rounds` rounds in which the engines take turns, with the least and the most.

`overhead` generates with a model of `--wide` hidden values and a vocabulary of `--vocabulary`, and
gives the seconds of its noise and proofs as shares of that time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.arguments import at_least, several
from benchmarks.spread import load_average, spread
from peers.engines.batch import generate
from peers.engines.engine import Engine, Piece, Request
from peers.engines.sampling import gumbel_noise
from peers.proofs import toploc
from swarm.app.output import print_json

KEY = (11, 12)
GROUP = 8
EQUAL = 64
WIDE_TOKENS = 16


@dataclass(frozen=True)
class Size:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int


SIZES = {
    "0.23": Size(96, 288, 2, 4, 2, 64),
    "20": Size(384, 1536, 8, 6, 2, 8192),
    "95": Size(768, 2304, 12, 12, 4, 16384),
}
"""By millions of parameters; the first is the demo's."""


def make_model(folder: Path, size: Size) -> None:
    """Save a random model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_requests(
    size: Size, count: int, prompt: int, limit: int, equal: bool = False
) -> list[Request]:
    """Groups on shared prompts; the noise of a row is the same for every engine."""
    drawn = random.Random(count)
    prompts = [
        [drawn.randrange(size.vocabulary) for _ in range(prompt)] for _ in range(-(-count // GROUP))
    ]
    lengths = [round(math.exp(drawn.uniform(0, math.log(limit)))) for _ in range(count)]
    return [
        Request(
            id=row,
            tokens=prompts[row // GROUP],
            row=row,
            noise_key=KEY,
            temperature=1.0,
            stop_ids=(),
            limit=EQUAL if equal else lengths[row],
        )
        for row in range(count)
    ]


def native_engine(folder: Path, batch: int) -> Engine:
    from peers.engines.native import NativeEngine

    return NativeEngine(folder, slots=batch)


def prove(pieces: Sequence[Piece]) -> None:
    """Build the proofs of all pieces."""
    toploc.build(
        [
            chunk
            for piece in pieces
            for chunk in toploc.chunk_rows(piece.prompt_hidden, piece.hidden)
        ]
    )


class Transformers:
    """`generate`, a static batch at a time."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], batch: int) -> int:
        """Generate; return the number of tokens."""
        from transformers import StoppingCriteriaList

        made = 0
        for start in range(0, len(requests), batch):
            some = requests[start : start + batch]
            prompts = torch.tensor([list(each.tokens) for each in some])
            limits = torch.tensor([each.limit for each in some])
            self._model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=int(limits.max()),
                pad_token_id=0,
                eos_token_id=None,
                stopping_criteria=StoppingCriteriaList([partial(_ends, limits + prompts.shape[1])]),
            )
            made += int(limits.sum())
        return made


def _ends(lengths: torch.Tensor, tokens: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
    """A stopping criterion: whether each row has its length."""
    return tokens.shape[1] >= lengths


T = TypeVar("T")


def timed(job: Callable[..., T], *arguments: Any) -> tuple[T, float]:
    """The result of a job, and its processor seconds."""
    began = time.process_time()
    result = job(*arguments)
    return result, time.process_time() - began


def measure(
    folder: Path, size: Size, batch: int, given: argparse.Namespace, equal: bool
) -> dict[str, Any]:
    """All engines on the same requests, in turns."""
    count = max(GROUP, batch * (1 if equal else given.waves))
    requests = make_requests(size, count, given.prompt, given.limit, equal)
    greedy = [replace(request, noise_key=None) for request in requests]
    native, hf = native_engine(folder, batch), Transformers(folder)
    tokens = sum(request.limit for request in requests)
    seconds = defaultdict[str, list[float]](list)
    for _ in range(given.rounds):
        if not equal:
            seconds["plain"].append(timed(generate, native, greedy)[1])
        made, took = timed(generate, native, requests)
        seconds["native"].append(took)
        if not equal:
            seconds["proofs"].append(timed(prove, made)[1])
        seconds["hf"].append(timed(hf.generate, requests, batch)[1])
    if given.vllm:
        seconds["vllm"] = ask_vllm(folder, batch, requests, given)
    told: dict[str, Any] = {"requests": count, "tokens": tokens}
    for name, values in seconds.items():
        if name != "proofs":
            told |= spread(f"{name}_tokens_per_second", [tokens / each for each in values], 0)
    for other in ("hf", "vllm"):
        if other in seconds:
            told |= spread(
                f"native_over_{other}",
                [
                    theirs / ours
                    for theirs, ours in zip(seconds[other], seconds["native"], strict=True)
                ],
            )
    if not equal:
        told |= spread("proofs_share", shares(seconds["proofs"], seconds["native"]), 4)
        added = [
            noisy - plain for noisy, plain in zip(seconds["native"], seconds["plain"], strict=True)
        ]
        told |= spread("noise_share", shares(added, seconds["native"]), 4)
    return told


def shares(parts: Sequence[float], wholes: Sequence[float]) -> list[float]:
    return [part / whole for part, whole in zip(parts, wholes, strict=True)]


def ask_vllm(
    folder: Path, batch: int, requests: Sequence[Request], given: argparse.Namespace
) -> list[float]:
    """Seconds of each round with the engine vllm under its own interpreter."""
    job = {
        "folder": str(folder),
        "batch": batch,
        "rounds": given.rounds,
        "requests": [[list(each.tokens), each.row, each.limit] for each in requests],
    }
    done = subprocess.run(
        [given.vllm, "-m", "benchmarks.engine", "--child"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{given.vllm} fails: {done.stderr[-2000:]}")
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def serve_child() -> None:
    """Do the job on standard input with the engine vllm, and print the seconds of each round."""
    from peers.engines.registry import make_engine
    from swarm.jobs import Hardware

    job = json.load(sys.stdin)
    engine = make_engine("vllm", Path(job["folder"]), Hardware(device="cpu", dtype="float32"))
    requests = [
        Request(index, tokens, row, KEY, 1.0, (), limit)
        for index, (tokens, row, limit) in enumerate(job["requests"])
    ]
    generate(engine, requests[: job["batch"]])
    print(json.dumps([timed(generate, engine, requests)[1] for _ in range(job["rounds"])]))


def draw_noise(vocabulary: int) -> None:
    """The noise of `WIDE_TOKENS` steps of a group, as the engine computes it."""
    rows = torch.arange(GROUP)
    for position in range(WIDE_TOKENS):
        for row in rows:
            gumbel_noise(KEY, row[None], torch.tensor([position]), vocabulary)


def measure_overhead(given: argparse.Namespace) -> dict[str, Any]:
    """The shares of noise and proofs at a large width and vocabulary."""
    size = Size(
        given.wide,
        3 * given.wide,
        given.wide_layers,
        given.wide // 128,
        max(1, given.wide // 1024),
        given.vocabulary,
    )
    seconds = defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory(prefix="engine-") as name:
        make_model(Path(name), size)
        engine = native_engine(Path(name), GROUP)
        requests = [replace(each, limit=WIDE_TOKENS) for each in make_requests(size, GROUP, 16, 2)]
        for _ in range(given.rounds):
            made, took = timed(generate, engine, requests)
            seconds["generate"].append(took)
            seconds["proofs"].append(timed(prove, made)[1])
            seconds["noise"].append(timed(draw_noise, size.vocabulary)[1])
    told: dict[str, Any] = {"layers": size.layers, "tokens": WIDE_TOKENS * GROUP}
    for part in ("noise", "proofs"):
        told |= spread(f"{part}_share", shares(seconds[part], seconds["generate"]), 4)
    return told | spread("generate_seconds", seconds["generate"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--batches", type=several(at_least(1)), default=[1, 16, 64])
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--waves", type=at_least(1), default=4)
    parser.add_argument("--prompt", type=at_least(1), default=64)
    parser.add_argument("--limit", type=at_least(2), default=512)
    parser.add_argument("--vllm", default="", help="interpreter of an environment with vLLM")
    parser.add_argument("--wide", type=at_least(128), default=2048)
    parser.add_argument("--wide-layers", type=at_least(0), default=4, help="0: no overhead")
    parser.add_argument("--vocabulary", type=at_least(64), default=150_000)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.child:
        serve_child()
        return
    toploc.build([torch.randn(32, 64).bfloat16()])  # builds the tables
    told: dict[str, Any] = {**vars(given), "load_average": load_average()}
    for name in given.sizes:
        with tempfile.TemporaryDirectory(prefix="engine-") as folder:
            make_model(Path(folder), SIZES[name])
            told[f"{name}M"] = {
                str(batch): {
                    "log_uniform": measure(Path(folder), SIZES[name], batch, given, False),
                    "equal": measure(Path(folder), SIZES[name], batch, given, True),
                }
                for batch in given.batches
            }
    if given.wide_layers:
        told["overhead"] = measure_overhead(given)
    print_json(told)


if __name__ == "__main__":
    main()
