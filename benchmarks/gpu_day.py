"""What waits for a GPU, in ten minutes: tests, speed, checks, thresholds, a swarm.

    python -m benchmarks.gpu_day --model SmolLM2-135M-Instruct --out gpu-day
    python -m benchmarks.gpu_day --model SmolLM2-135M-Instruct --out rehearsal --device cpu

Runs each step in a process of its own with a deadline, writes what it printed to a file of the
folder `--out`, and `summary.json` anew after each, so that nothing is lost where the machine goes
away. A step that fails or is late does not stop the next. `--only` runs some. The card, the driver
and the versions stand in the summary, for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import several
from peers.models.find import find_model
from swarm.terminal.output import print_json

PYTHON = sys.executable


@dataclass(frozen=True)
class Step:
    name: str
    command: list[str]
    seconds_max: float


def steps(model: Path, out: Path, device: str, vllm: str) -> Iterator[Step]:
    """In order of what is missed most."""
    small = ["--rounds", "2", "--waves", "1", "--limit", "128"]
    tests = ["-m", "gpu", "-n0", "-q", "-r", "s", "tests/engines", "tests/trainer"]
    yield Step("tests", [PYTHON, "-m", "pytest", *tests], 150)
    here = ["--model", str(model), "--device", device]
    sizes = ["--dtypes", "bfloat16,float32", "--batches", "8,64,256" if device == "cuda" else "2"]
    more = ["--vllm", vllm] if vllm else []
    yield Step("engines", [PYTHON, "-m", "benchmarks.engine", *here, *sizes, *small, *more], 120)
    checks = [PYTHON, "-m", "benchmarks.verification", *here, *small]
    yield Step("checks", [*checks, "--batch", "64" if device == "cuda" else "8"], 60)
    measure = [PYTHON, "-m", "benchmarks.gpu_day", "--thresholds", "--out", str(out)]
    yield Step("thresholds", [*measure, "--model", str(model)], 120)
    demo = ["demo", "--model", str(model), "--steps", "8", "--plain", "--out", str(out / "demo")]
    swarm = str(Path(PYTHON).with_name("swarm"))
    yield Step("swarm", [swarm, *demo], 150)


def run(step: Step, out: Path) -> dict[str, Any]:
    """How a step ended; all that it printed is in `out`/NAME.txt."""
    began = time.monotonic()
    with (out / f"{step.name}.txt").open("w") as printed:
        try:
            status: int | str = subprocess.run(
                step.command, stdout=printed, stderr=subprocess.STDOUT, timeout=step.seconds_max
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"not done after {step.seconds_max:.0f} s"
    return {"status": status, "seconds": round(time.monotonic() - began, 1)}


def thresholds(model: Path) -> None:
    """Print how much fp32 and bf16 on every device of this machine differ, and thresholds."""
    from benchmarks.evidence import Chat
    from peers.calibration.calibrate import measure_run
    from peers.engines.config import read_config
    from swarm.wire.manifest import Sampling

    stop = read_config(model)["eos_token_id"]
    sampling = Sampling(temperature=1.0, max_new_tokens=64, stop_ids=[stop])
    print(measure_run(model, [Chat()], sampling, [], print, lambda _done, _all: None).toml)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    told: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"]
        told["card"] = torch.cuda.get_device_name()
        told["nvidia_smi"] = subprocess.run(asked, capture_output=True, text=True).stdout
    return told | {"date": time.strftime("%Y-%m-%d")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder, a GGUF file, or a hub's name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--vllm", default="", help="interpreter of an environment with vLLM")
    parser.add_argument("--only", type=several(str), default=[], help="names of steps")
    parser.add_argument("--thresholds", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    model = find_model(given.model, "--model").folder
    if given.thresholds:
        thresholds(model)
        return
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU with CUDA is here; --device cpu rehearses the steps")
    given.out.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {"machine": machine(), "steps": {}}
    for step in steps(model, given.out, given.device, given.vllm):
        if not given.only or step.name in given.only:
            told["steps"][step.name] = run(step, given.out)
            (given.out / "summary.json").write_text(json.dumps(told, indent=2))
    print_json(told)


if __name__ == "__main__":
    main()
