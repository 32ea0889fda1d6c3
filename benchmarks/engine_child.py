"""Other engines under interpreters of their own, for benchmarks whose engines take turns.

    ENV/bin/python -m benchmarks.engine_child vllm FOLDER SLOTS DTYPE
    ENV/bin/python -m benchmarks.engine_child llama FILE.gguf SLOTS DTYPE

loads a policy on one thread of the CPU (llama.cpp in the type that the file has), then reads
requests from standard input, a JSON list of `[tokens, row, noise key, limit]` in a line, and
answers each line with the processor seconds that they took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peers.engines.engine import Request  # imports torch, which llama.cpp's Python lacks


class Child:
    """A running child."""

    def __init__(self, process: subprocess.Popen[str], complaints: Path) -> None:
        self._process = process
        self._complaints = complaints

    def seconds(self, requests: Sequence[Request]) -> float:
        """Let the child generate; return its processor seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        job = [[list(each.tokens), each.row, each.noise_key, each.limit] for each in requests]
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            said = self._complaints.read_text(errors="replace")[-2000:]
            raise SystemExit(f"{self._process.args!r} fails: {said}")
        return float(answer)


@contextmanager
def running(python: str, engine: str, path: Path, slots: int, dtype: str) -> Iterator[Child]:
    """Start an engine under the interpreter `python`; it ends with the context."""
    with tempfile.NamedTemporaryFile(prefix=f"{engine}-") as complaints:
        asked = [engine, str(path), str(slots), dtype]
        with subprocess.Popen(
            [python, "-m", "benchmarks.engine_child", *asked],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ) as process:
            try:
                yield Child(process, Path(complaints.name))
            finally:
                process.kill()
                process.stdin = None  # what it did not read is nobody's


Job = Sequence[tuple[list[int], int, tuple[int, int], int]]


def vllm(folder: Path, slots: int, dtype: str) -> Callable[[Job], None]:
    """vLLM with the noise and the records of the engine `vllm`."""
    import torch

    from peers.engines.batch import generate
    from peers.engines.engine import Request
    from peers.engines.registry import make_engine
    from swarm.jobs import Hardware

    torch.set_num_threads(1)
    engine = make_engine("vllm", folder, Hardware(device="cpu", dtype=dtype, slots=slots))

    def run(job: Job) -> None:
        requests = [
            Request(index, tokens, row, (key[0], key[1]), 1.0, (), limit)
            for index, (tokens, row, key, limit) in enumerate(job)
        ]
        generate(engine, requests)

    return run


CONTEXT = 1024
"""Positions of each of llama.cpp's sequences."""


def llama(file: Path, slots: int, _: str) -> Callable[[Job], None]:
    """llama.cpp with its own sampling at temperature 1, and slots that are refilled."""
    import llama_cpp as lib  # type: ignore[import-not-found]

    model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
    asked = lib.llama_context_default_params()
    asked.n_ctx, asked.n_seq_max, asked.n_batch = slots * CONTEXT, slots, 2048
    asked.n_threads = asked.n_threads_batch = 1
    context = lib.llama_init_from_model(model, asked)
    sampler = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_dist(0))
    batch = lib.llama_batch_init(2048, 0, 1)

    def run(job: Job) -> None:
        waiting = [(tokens, limit) for tokens, _row, _key, limit in reversed(job)]
        free, live = list(range(slots)), dict[int, list[int]]()  # slot → [position, left, token]
        while waiting or live:
            asks: list[tuple[int, int]] = []  # (slot, index of its last token in the batch)
            batch.n_tokens = 0
            for slot, (position, _left, token) in live.items():
                asks.append((slot, add(batch, token, position, slot, True)))
            while waiting and free and batch.n_tokens + len(waiting[-1][0]) <= 2048:
                (tokens, limit), slot = waiting.pop(), free.pop()
                for position, token in enumerate(tokens):
                    at = add(batch, token, position, slot, position == len(tokens) - 1)
                asks.append((slot, at))
                live[slot] = [len(tokens) - 1, limit, 0]
            if lib.llama_decode(context, batch):
                raise SystemExit("llama.cpp fails to decode")
            for slot, at in asks:
                row = live[slot]
                row[:] = [row[0] + 1, row[1] - 1, lib.llama_sampler_sample(sampler, context, at)]
                if not row[1]:
                    del live[slot]
                    free.append(slot)
                    lib.llama_memory_seq_rm(lib.llama_get_memory(context), slot, -1, -1)

    return run


def add(batch: Any, token: int, position: int, slot: int, wanted: bool) -> int:
    """Append a token to a batch of llama.cpp; its index there."""
    at = int(batch.n_tokens)
    batch.token[at], batch.pos[at], batch.logits[at] = token, position, wanted
    batch.n_seq_id[at], batch.seq_id[at][0] = 1, slot
    batch.n_tokens += 1
    return at


def main() -> None:
    """Answer the parent until it closes standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, too
    engine, path, slots, dtype = sys.argv[1:]
    run = {"vllm": vllm, "llama": llama}[engine](Path(path), int(slots), dtype)
    for line in sys.stdin:
        began = time.process_time()
        run(json.loads(line))
        print(time.process_time() - began, file=answers, flush=True)


if __name__ == "__main__":
    main()
