"""What a child process computes with: the device, the dtype, and what it finds on its machine."""

import os
import re
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.engines.installed import NATIVE
from swarm.errors import UserError
from swarm.jobs import Hardware
from swarm.jobs.inference import InferenceSetup, Surveyed
from swarm.version import __version__
from swarm.world.machine import free_memory_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

BF16_SINCE = (8, 0)
"""Compute capability of GPUs that compute in bfloat16 (Ampere); older ones only emulate it."""

BF16_FEATURES = ("amx_bf16", "avx512_bf16")
"""Of CPUs whose products in bfloat16 take about half the time of those in float32."""

GPU_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/kfd")
"""Files that exist where the kernel has a driver of NVIDIA's or AMD's GPUs."""


MEMORY_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)
"""What a bare `RuntimeError` says when memory is short: torch on a CPU, CUDA, its libraries."""


def use_hardware(hardware: Hardware) -> None:
    """Check the device and set this process's threads and precision; raises `UserError`."""
    find_device(hardware.device)
    torch.set_num_threads(hardware.threads)
    # Partial sums of a bf16 product stay in fp32, so that two GPUs agree as closely as they can.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def upload(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of Python numbers on a device, without waiting for the device's queue.

    A GPU copies from page-locked memory, which torch reuses only when the copy is done."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """The torch device of a setting (`auto`, or `cuda` by local rank); raises `UserError`."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    known = ["cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
    if name not in known:
        raise UserError(
            f"device {name!r} is not on this machine; there are: {', '.join(known)}"
            + (f" ({why_no_cuda()})" if name.startswith("cuda") and not count else "")
        )
    if name != "cuda":
        return torch.device(name)
    if local_rank >= count:
        raise UserError(
            f"rank {local_rank} of this machine has no GPU of its own; there are {count}: start "
            "fewer ranks, or let CUDA_VISIBLE_DEVICES show more GPUs"
        )
    return torch.device("cuda", local_rank)


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype for a setting: `auto` is bfloat16 on a GPU that computes in it, else float32;
    `fastest` is bfloat16 on a CPU with products in it, too."""
    if name in ("auto", "fastest"):
        features = torch.cpu.get_capabilities()
        half = name == "fastest" and any(features.get(each, False) for each in BF16_FEATURES)
        if device.type == "cuda":
            half = torch.cuda.get_device_capability(device) >= BF16_SINCE
        name = "bfloat16" if half else "float32"
    return DTYPES[name]


def why_no_cuda() -> str:
    """One clause that says why torch finds no GPU. Called where it finds none."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this PyTorch {torch.__version__} is built without CUDA; install a build with it"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip("-1, "):
        return "CUDA_VISIBLE_DEVICES hides every GPU; unset it"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of what is said here
            torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f"CUDA does not start: {str(error).strip().partition(chr(10))[0]}"
    return "the driver reports no GPU"


def unused_gpu(device: torch.device, files: Sequence[str] = GPU_FILES) -> str:
    """Why `auto` chose the CPU on a machine with a GPU; empty where it has none or uses it."""
    if device.type == "cuda" or not any(Path(each).exists() for each in files):
        return ""
    return f"this machine has a GPU that is not used: {why_no_cuda()}"


def available_bytes(device: torch.device) -> int:
    """Memory of a device that is free now; on a CPU, within the limits of containers."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept  # torch keeps what was freed
    return free_memory_bytes()


def title_of(device: torch.device) -> str:
    """The name of a device's model."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "CPU"
    name = next((line for line in lines if line.startswith("model name")), "")
    return name.partition(":")[2].strip() or "CPU"


def driver_of(device: torch.device) -> str:
    """The version of a GPU's driver, or of CUDA where the driver does not say; empty on a CPU."""
    if device.type != "cuda":
        return ""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)", text)
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return f"driver {found[1]}, {runtime}" if found else runtime


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory is short; outside torch's allocator only its words do."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in MEMORY_WORDS)


def survey(setup: InferenceSetup) -> Surveyed:
    """Report engine and device; raises `UserError` for a device that this machine lacks."""
    device = find_device(setup.hardware.device)
    return Surveyed(
        engine=setup.engine,
        engine_version=_version_of(setup.engine),
        torch_version=str(torch.__version__),
        device=str(device),
        device_title=title_of(device),
        driver=driver_of(device),
        dtype=str(find_dtype(setup.hardware.dtype, device)).removeprefix("torch."),
        threads=torch.get_num_threads(),
        free_bytes=available_bytes(device),
        unused_gpu=unused_gpu(device) if setup.hardware.device == "auto" else "",
    )


def _version_of(engine: str) -> str:
    """The engine's version; empty for an engine whose package has another name."""
    if engine == NATIVE:
        return __version__
    for name in (engine, f"{engine}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""
