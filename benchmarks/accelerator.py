"""All figures of one GPU: generation, swaps, prefill, overhead, verification, training, a swarm.

    python -m benchmarks.accelerator
    python -m benchmarks.accelerator --parts generate,overhead --models 1.5b
    python -m benchmarks.accelerator --parts vllm --vllm HOME/engines/vllm/bin/python
    python -m benchmarks.accelerator --parts '' --swarm
    python -m benchmarks.accelerator --smoke

Prints one JSON object, with figures or a reason for each part and model. Policies have the shapes
of Qwen2.5 and random weights. Each part and model runs in a process of its own, for at most
`--seconds`, so that a failure costs nothing else; `--output` holds the finished parts at any time.
`--smoke` runs everything but the swarm with a tiny model on a CPU, in this process, and shows only
that the command works. `benchmarks.generation` and `benchmarks.training_step` say what is measured.
The swarm is imported only when it is asked for: it needs the network's packages, the rest does not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import generation, training_step
from benchmarks.arguments import at_least, several
from benchmarks.shapes import MODELS
from benchmarks.training_step import TOKENS_MIN
from peers.engines.device import title_of
from peers.trainer import metrics
from peers.trainer.learning.masks import ATTENTIONS
from swarm.terminal.output import print_json

PARTS = [*generation.PARTS, "train"]

SMOKE = {
    "device": "cpu", "models": ["tiny"], "dtype": "float32", "batches": [2], "rounds": 1,
    "prompt": 4, "completion": 40, "tokens": TOKENS_MIN, "steps": 1, "attention": ["sdpa"],
}  # fmt: skip


def run_part(part: str, name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The figures of one part and model, in this process."""
    if part == "train":
        peak = given.peak_tflops * 1e12 or metrics.peak_flops(torch.device(given.device))
        figures = training_step.compare(name, given, peak)
        return {**figures, "tokens": given.tokens, "peak_tflops": peak / 1e12 or None}
    return generation.run_part(part, name, folder, given)


def run_apart(part: str, name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """`run_part` in a process of its own, which ends after `--seconds`."""
    python = given.vllm if part == "vllm" and given.vllm else sys.executable
    options = [*sys.argv[1:], "--one", part, name, str(folder)]
    try:
        done = subprocess.run(
            [python, "-m", "benchmarks.accelerator", *options],
            stdout=subprocess.PIPE,
            timeout=given.seconds,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"it did not end within {given.seconds} s"}
    except subprocess.CalledProcessError as error:
        return {"reason": f"it ended with status {error.returncode}; its words are above"}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run the parts, one after the other."""
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": title_of(torch.device(given.device)),
        "torch": torch.__version__,
        "dtype": given.dtype,
        "models": {},
    }
    run = run_part if given.smoke else run_apart
    for name in given.models:
        found = result["models"][name] = {"shape": MODELS[name]}
        with tempfile.TemporaryDirectory() as folder:
            for part in given.parts:
                began = time.monotonic()
                found[part] = run(part, name, Path(folder), given)
                print(f"{name} {part}: {time.monotonic() - began:.0f} s", file=sys.stderr)
                _keep(result, given)
    if given.swarm:
        from benchmarks.one_gpu_swarm import run_swarm

        result["swarm"] = run_swarm(given)
        _keep(result, given)
    return result


def _keep(result: dict[str, Any], given: argparse.Namespace) -> None:
    if given.output:
        given.output.write_text(json.dumps(result, indent=1))


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", type=_some_of(PARTS), default=PARTS, help=",".join(PARTS))
    parser.add_argument("--models", type=_some_of(list(MODELS)), default=["0.5b", "1.5b"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--seconds", type=at_least(1), default=240, help="most for each part and model"
    )
    parser.add_argument("--output", type=Path, help="file for the figures as they come")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU")
    generating = parser.add_argument_group("generation")
    generating.add_argument("--batches", type=several(at_least(1)), default=[1, 16, 64, 256])
    generating.add_argument("--rounds", type=at_least(1), default=3)
    generating.add_argument("--prompt", type=at_least(2), default=64, help="tokens")
    generating.add_argument("--completion", type=at_least(1), default=256, help="tokens")
    generating.add_argument("--vllm", help="the Python interpreter that has vLLM")
    training = parser.add_argument_group("training")
    training.add_argument("--tokens", type=at_least(TOKENS_MIN), default=1 << 14)
    training.add_argument("--attention", type=_some_of(ATTENTIONS), default=list(ATTENTIONS[:3]))
    training.add_argument("--steps", type=at_least(1), default=5, help="measured steps")
    training.add_argument("--activation-checkpointing", action="store_true")
    training.add_argument(
        "--peak-tflops", type=float, default=0.0, help="of the device; 0: as its name says"
    )
    together = parser.add_argument_group("swarm")
    together.add_argument("--swarm", action="store_true", help="a swarm on the device as well")
    together.add_argument("--swarm-steps", type=at_least(1), default=20)
    together.add_argument("--engines", type=Path, help="the folder `engines` of a home with vLLM")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.smoke:
        vars(given).update(SMOKE)
    return given


def main() -> None:
    """Command line."""
    given = _read_arguments()
    if given.device == "cuda" and not torch.cuda.is_available():
        print(
            "there is no CUDA GPU here; to try the command without one: python -m "
            "benchmarks.accelerator --smoke",
            file=sys.stderr,
        )
        sys.exit(2)
    if given.device == "cpu":
        torch.set_num_threads(1)
    if given.one:
        part, name, folder = given.one
        print(json.dumps(run_part(part, name, Path(folder), given)))
    else:
        print_json(measure(given))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _some_of(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """Argparse reader of comma-separated names out of `choices`."""

    def read(text: str) -> list[str]:
        names = text.split(",") if text else []
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(choices)}")
        return names

    return read


if __name__ == "__main__":
    main()
