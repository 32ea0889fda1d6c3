"""A submission of a deep model with a large vocabulary through the whole chain, by part.

    python -m benchmarks.growth --layers 48 --vocabulary 150000

Prints one JSON object. Thresholds are calibrated on other submissions of the same model. Then every
part runs in a process of its own, as in a peer: a worker generates a submission with proofs in each
dtype, a validator inspects each file, and judges it in both dtypes. Seconds are wall clock, memory
is the most that the part's process held (`mib`), beside what it holds with nothing loaded
(`mib_idle`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import trio
from blake3 import blake3

from benchmarks.arguments import at_least
from benchmarks.deep_model import make_deep_model
from benchmarks.spread import load_average
from peers.calibration.calibrate import EngineClass
from peers.calibration.measure import sample
from peers.calibration.thresholds import propose
from peers.calibration.workers import Generates
from peers.calibration.workload import Workload
from peers.demo.recipes import ENVIRONMENT
from peers.engines.demo import EOS_ID
from peers.environments import load as load_environment
from peers.inference.engine_service import EngineService
from peers.validator.inspector import InspectorService
from peers.validator.prefill import PrefillService
from swarm.identity import Identity
from swarm.jobs import Hardware, Load, SubmissionOrder
from swarm.jobs.inference import Generate, InferenceSetup
from swarm.jobs.validation import Inspect, InspectionSetup, Judge, PrefillSetup
from swarm.manifest import EnvironmentReference, Sampling, Thresholds
from swarm.messages import CheckpointReference
from swarm.terminal.output import print_json

DTYPES = ("float32", "bfloat16")
POLICY = CheckpointReference(lineage=0, step=1, digest=bytes(32), size_bytes=1)
PART_SECONDS = 1800.0
"""Deadline of one part."""


@dataclass(frozen=True)
class Size:
    """The model's and the submission's."""

    layers: int
    vocabulary: int
    groups: int
    group_size: int
    tokens: int

    def sampling(self) -> Sampling:
        return Sampling(
            max_new_tokens=self.tokens,
            stop_ids=[EOS_ID],
            group_size=self.group_size,
            groups_per_submission=self.groups,
        )

    def order(self) -> SubmissionOrder:
        return SubmissionOrder(
            run="owner/growth",
            policy=POLICY,
            step=1,
            nonce=bytes(32),
            worker=Identity(bytes(32)).peer_id,
            number=0,
            groups=self.groups,
            environments=[EnvironmentReference(name=ENVIRONMENT.name, version=ENVIRONMENT.version)],
            sampling=self.sampling(),
        )


def calibrated(folder: Path, size: Size, submissions: int) -> Thresholds:
    """The thresholds that `swarm proofs calibrate` proposes for this model, without its attacks."""
    environment = load_environment(ENVIRONMENT.name, ENVIRONMENT.version)
    workload = Workload(folder, size.sampling(), environment)
    engines = [EngineClass(dtype, "cpu").engine(folder) for dtype in DTYPES]
    return propose(
        [
            [sample(Generates(worker), validator, workload, n) for n in range(submissions)]
            for worker in engines
            for validator in engines
        ]
    )


def generate(work: Path, size: Size, dtype: str) -> dict[str, Any]:
    """Generate a submission with proofs into a file."""
    service = EngineService(
        InferenceSetup(environments=[], hardware=Hardware(device="cpu", dtype=dtype))
    )
    idle = _mib()
    _, loading = _timed(service.load, Load(policy=POLICY, folder=str(work / "model")))
    job = Generate(order=size.order(), path=str(work / f"{dtype}.parquet"))
    made, seconds = _timed(service.generate, job)
    return {
        "seconds": seconds,
        "seconds_loading": loading,
        "seconds_proofs": made.seconds_proofs,
        "mib": _mib(),
        "mib_idle": idle,
        "tokens": made.tokens,
        "file_bytes": made.size_bytes,
    }


def inspect(work: Path, size: Size, dtype: str) -> dict[str, Any]:
    """Inspect a file, and write its rollouts in canonical form."""
    service = InspectorService(InspectionSetup(environments=[]))
    idle = _mib()
    raw = (work / f"{dtype}.parquet").read_bytes()
    job = Inspect(
        order=size.order(),
        path=str(work / f"{dtype}.parquet"),
        digest=blake3(raw).digest(),
        canonical_path=str(work / f"{dtype}.canonical"),
        tokenizer_folder=str(work / "model"),
        bytes_max=64 << 20,
    )
    times: list[float] = []
    readers: list[float] = []

    async def main() -> Any:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.run)
            for _ in range(2):  # the first call loads the tokenizer and starts the reader
                began = time.perf_counter()
                found = await service.inspect(job)
                times.append(time.perf_counter() - began)
            readers.extend(map(_mib, _children()))
            nursery.cancel_scope.cancel()
        return found

    found = trio.run(main)
    return {
        "seconds": times[1],
        "seconds_first": times[0],
        "mib": _mib(),
        "mib_idle": idle,
        "mib_reader": max(readers),
        "failed": found.failed,
    }


def judge(work: Path, size: Size, dtype: str, recomputing: str) -> dict[str, Any]:
    """Recompute an inspected submission with the calibrated thresholds."""
    service = PrefillService(PrefillSetup(hardware=Hardware(device="cpu", dtype=recomputing)))
    idle = _mib()
    _, loading = _timed(service.load, Load(policy=POLICY, folder=str(work / "model")))
    raw = (work / f"{dtype}.canonical").read_bytes()
    job = Judge(
        order=size.order(),
        path=str(work / f"{dtype}.canonical"),
        digest=blake3(raw).digest(),
        thresholds=msgspec.json.decode((work / "thresholds").read_bytes(), type=Thresholds),
        rewards=[],
    )
    found, seconds = _timed(service.judge, job)
    return {
        "seconds": seconds,
        "seconds_loading": loading,
        "mib": _mib(),
        "mib_idle": idle,
        "failed": found.failed,
        "mismatches": found.sampling.mismatches,
        "margin_mean": found.sampling.margin_mean,
        "margin_max": found.sampling.margin_max,
        "error_mean": found.proofs.error_mean,
        "exponents_min": found.proofs.exponents_min,
    }


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "generate": generate,
    "inspect": inspect,
    "judge": judge,
}


def apart(part: str, work: Path, size: Size, *dtypes: str) -> dict[str, Any]:
    """Run one part in a process of its own; return its figures."""
    fields = [str(value) for value in (size.layers, size.vocabulary)]
    fields += [str(value) for value in (size.groups, size.group_size, size.tokens)]
    command = [sys.executable, "-m", "benchmarks.growth", "--part", part, str(work)]
    done = subprocess.run(
        [*command, *fields, *dtypes], stdout=subprocess.PIPE, check=True, timeout=PART_SECONDS
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def chain(work: Path, size: Size, submissions: int) -> dict[str, Any]:
    """Calibrate, then take a submission of each dtype through the chain."""
    torch.set_num_threads(1)
    made, seconds = _timed_here(
        lambda: make_deep_model(
            work / "model",
            layers=size.layers,
            vocabulary=size.vocabulary,
            positions=max(64, 2 * size.tokens),
        )
    )
    figures: dict[str, Any] = {
        "size": vars(size),
        "model_bytes": (made / "model.safetensors").stat().st_size,
        "tokenizer_bytes": (made / "tokenizer.json").stat().st_size,
        "seconds_making": seconds,
    }
    thresholds, seconds = _timed_here(lambda: calibrated(made, size, submissions))
    (work / "thresholds").write_bytes(msgspec.json.encode(thresholds))
    figures |= {"thresholds": msgspec.structs.asdict(thresholds), "seconds_calibrating": seconds}
    for dtype in DTYPES:
        figures[f"generate {dtype}"] = apart("generate", work, size, dtype)
        figures[f"inspect {dtype}"] = apart("inspect", work, size, dtype)
        for recomputing in DTYPES:
            judged = apart("judge", work, size, dtype, recomputing)
            figures[f"judge {dtype} in {recomputing}"] = judged
    return figures


def _timed(job: Callable[..., Any], argument: Any) -> tuple[Any, float]:
    return _timed_here(lambda: trio.run(job, argument))


def _timed_here(job: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = job()
    return result, time.perf_counter() - began


def _mib(process: str = "self") -> float:
    """The most memory that a process has held. (`getrusage` would add its parent's.)"""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _children() -> list[str]:
    return [
        process
        for thread in Path("/proc/self/task").iterdir()
        for process in (thread / "children").read_text(encoding="utf-8").split()
    ]


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["--part"]:
        part, work, *rest = sys.argv[2:]
        size = Size(*map(int, rest[:5]))
        torch.set_num_threads(1)
        print_json(PARTS[part](Path(work), size, *rest[5:]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=at_least(1), default=48)
    parser.add_argument("--vocabulary", type=at_least(64), default=150_000)
    parser.add_argument("--groups", type=at_least(1), default=4)
    parser.add_argument("--group-size", type=at_least(2), default=8)
    parser.add_argument("--tokens", type=at_least(8), default=32)
    parser.add_argument("--submissions", type=at_least(1), default=4, help="for the calibration")
    given = parser.parse_args()
    size = Size(given.layers, given.vocabulary, given.groups, given.group_size, given.tokens)
    with tempfile.TemporaryDirectory() as work:
        figures = chain(Path(work), size, given.submissions)
    print_json({**figures, "load_average": load_average()})


if __name__ == "__main__":
    main()
