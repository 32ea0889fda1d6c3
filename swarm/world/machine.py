"""The real machine: trio's clock, the system's wall time and randomness, its free memory."""

import os
import random
import secrets
import sys
import time
from contextlib import suppress
from pathlib import Path

import trio


class Machine:
    """Implements `swarm.world.World` on this computer."""

    def __init__(self) -> None:
        self.random = random.Random(random.SystemRandom().getrandbits(64))
        self._correction_seconds = 0.0

    def now(self) -> float:
        return trio.current_time()

    def wall_time(self) -> float:
        return time.time() + self._correction_seconds

    def correct_clock(self, seconds: float) -> None:
        """Add `seconds` to the system's wall time from now on: the system's clock is wrong."""
        self._correction_seconds += seconds

    def secret_bytes(self, count: int) -> bytes:
        """Bytes of the system's cryptographic generator."""
        return secrets.token_bytes(count)


MEMORY_SHARE_MAX = 0.9
"""Most of the machine's memory that one child may take."""


def most_memory_bytes() -> int | None:
    """The private memory that any one process may take: most of the machine's.

    So a child that grows without end fails with `MemoryError`, before the kernel chooses which
    process of the machine to kill. None with a GPU: CUDA reserves addresses beyond all memory."""
    if any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
        return None
    return int(MEMORY_SHARE_MAX * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process and its children may still use, within the machine and the
    containers (control groups) around them. `root` contains `proc` and `sys`."""
    free = [sys.maxsize]
    with suppress(OSError, ValueError, StopIteration):  # not Linux: unknown
        lines = (root / "proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        free.append(int(available.split()[1]) * 1024)
    with suppress(OSError, ValueError):
        own = (root / "proc/self/cgroup").read_text().strip().rpartition("::")[2]
        group = root / "sys/fs/cgroup" / own.lstrip("/")
        for folder in [group, *group.parents]:
            with suppress(OSError, ValueError):  # no such group, or no limit ("max")
                limit = int((folder / "memory.max").read_text())
                free.append(limit - int((folder / "memory.current").read_text()) + _cached(folder))
    return max(0, min(free))


def _cached(group: Path) -> int:
    """Bytes of cached files in a control group's memory, which the kernel frees when needed."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(fields["inactive_file"])
