"""The device and the dtype a child process computes with, resolved from the settings' `auto`."""

from __future__ import annotations

from pathlib import Path

import torch

from swarm.errors import UserError
from swarm.jobs import Hardware

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def use_hardware(hardware: Hardware) -> None:
    """Check the device and set the number of this process's threads; raises `UserError`."""
    find_device(hardware.device)
    torch.set_num_threads(hardware.threads)


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """The torch device for a setting; raises `UserError` for a device this machine lacks.

    `auto` is cuda if this machine has it, else the CPU. With `cuda`, each rank of the machine
    gets the device with its local rank.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    known = ["cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
    if name not in known:
        raise UserError(f"device {name!r} is not on this machine; there are: {', '.join(known)}")
    return torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype for a setting: `auto` is bfloat16 on cuda, float32 on a CPU."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return DTYPES[name]


def available_bytes(device: torch.device) -> int:
    """Memory of a device that is free now."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept  # torch keeps what was freed
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable")
