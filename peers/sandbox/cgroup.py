"""A control group that bounds the memory and the processes of a sandbox together.

Only root, or a user to whom a group was delegated, may make one; without it the limits of single
processes remain. Both versions of control groups are tried.
"""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from pathlib import Path

from peers.sandbox.program import Limits

GROUPS = Path("/sys/fs/cgroup")

OVERHEAD_BYTES = 64 << 20
"""Memory of the sandbox's own processes and of its root folder."""
OWN_PROCESSES = 2

_numbers = itertools.count()


class Group:
    """The folders of one control group: one in version 2, one for each controller in version 1."""

    def __init__(self, limits: Limits) -> None:
        """Make the group as far as it is allowed."""
        self._folders: list[Path] = []
        memory = str(limits.memory_bytes + limits.files_bytes + OVERHEAD_BYTES)
        processes = str(limits.processes + OWN_PROCESSES)
        parents = _own_groups()
        if "memory" in parents:
            self._make(parents["memory"], {"memory.limit_in_bytes": memory})
        if "pids" in parents:
            self._make(parents["pids"], {"pids.max": processes})
        if "" in parents and not self._folders:
            self._make(parents[""], {"memory.max": memory, "pids.max": processes})

    @property
    def bounds_memory(self) -> bool:
        """Whether this machine allowed a bound on memory."""
        names = ("memory.max", "memory.limit_in_bytes")
        return any((folder / name).exists() for folder in self._folders for name in names)

    def add(self, pid: int) -> None:
        """Put a process, and all that it starts from now on, into the group."""
        for folder in self._folders:
            with suppress(OSError):
                (folder / "cgroup.procs").write_text(str(pid))

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed a process of the group for its memory."""
        for folder in self._folders:
            for name in ("memory.events", "memory.oom_control"):
                with suppress(OSError):
                    words = (folder / name).read_text().split()
                    counts = dict(zip(words[::2], words[1::2], strict=False))
                    if counts.get("oom_kill", "0") != "0":
                        return True
        return False

    def close(self) -> None:
        """Remove the group; its processes have ended."""
        for folder in self._folders:
            with suppress(OSError):
                folder.rmdir()

    def _make(self, parent: Path, settings: dict[str, str]) -> None:
        folder = parent / f"swarm-sandbox-{os.getpid()}-{next(_numbers)}"
        try:
            folder.mkdir()
        except OSError:
            return
        try:
            # A missing file means that the controller is not delegated.
            for name, value in settings.items():
                with (folder / name).open("r+") as file:
                    file.write(value)
        except OSError:
            with suppress(OSError):
                folder.rmdir()
        else:
            self._folders.append(folder)


def _own_groups() -> dict[str, Path]:
    """The folder of this process's group for each controller; "" for version 2."""
    found: dict[str, Path] = {}
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                found[controller] = GROUPS / controller / path.lstrip("/")
    return found
