"""The engine vllm under its own interpreter, for benchmarks whose other engines take turns with it.

    ENV/bin/python -m benchmarks.vllm_child FOLDER SLOTS

loads a policy on the CPU in fp32, then reads requests from standard input, a JSON list of
`[tokens, row, noise key, limit]` in a line, and answers each line with the processor seconds that
they took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from peers.engines.batch import generate
from peers.engines.engine import Request
from swarm.jobs import Hardware


class Vllm:
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
def running_vllm(python: str, folder: Path, slots: int) -> Iterator[Vllm]:
    """Start vLLM under the interpreter `python`; it ends with the context."""
    with tempfile.NamedTemporaryFile(prefix="vllm-") as complaints:
        command = [python, "-m", "benchmarks.vllm_child", str(folder), str(slots)]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ) as process:
            try:
                yield Vllm(process, Path(complaints.name))
            finally:
                process.kill()


def main() -> None:
    """Answer the parent until it closes standard input."""
    import torch

    from peers.engines.registry import make_engine

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, too
    torch.set_num_threads(1)
    folder, slots = Path(sys.argv[1]), int(sys.argv[2])
    engine = make_engine("vllm", folder, Hardware(device="cpu", dtype="float32", slots=slots))
    for line in sys.stdin:
        requests = [
            Request(index, tokens, row, tuple(key), 1.0, (), limit)
            for index, (tokens, row, key, limit) in enumerate(json.loads(line))
        ]
        began = time.process_time()
        generate(engine, requests)
        print(time.process_time() - began, file=answers, flush=True)


if __name__ == "__main__":
    main()
