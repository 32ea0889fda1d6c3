"""A swarm of real peers on loopback, each a process of its own, and what a process costs."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import msgspec
import trio

from tests.end_to_end.harness import Swarm, make_base, running_fork_server, swarm

MIB = 1 << 20
ESTABLISHED = "01"
"""State of a TCP connection in /proc/net/tcp."""


@asynccontextmanager
async def running_swarm(steps: int, names: Sequence[str]) -> AsyncIterator[Swarm]:
    """Start a swarm. After the block no process is left, even after Ctrl-C or SIGTERM."""
    with prepared() as (folder, base, fork_server):
        async with (
            swarm(folder, base, fork_server, names=names, steps=steps) as peers,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(_heed_signals)
            await peers.start()
            yield peers
            nursery.cancel_scope.cancel()


@contextmanager
def prepared() -> Iterator[tuple[Path, Path, Path]]:
    """A temporary folder, a base policy in it, and the socket of a running fork server."""
    with tempfile.TemporaryDirectory(prefix="swarm-real-") as name:
        folder = Path(name)
        base = folder / "base"
        make_base(base)
        with running_fork_server(folder) as fork_server:
            yield folder, base, fork_server


async def _heed_signals() -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for which in signals:
            raise SystemExit(128 + which)


# --- what a process costs, from /proc ------------------------------------------------------------


class Memory(msgspec.Struct, frozen=True):
    """Memory of one process, in MiB."""

    resident: float
    """RSS: pages in memory, those shared with other processes included."""
    proportional: float
    """PSS: shared pages divided among their processes, so the sum of all processes is true."""
    unshared: float
    """USS: pages of this process alone; its end frees them."""


def memory_of(pid: int) -> Memory:
    """Raises `OSError` if there is no such process."""
    sizes: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        sizes[name.rstrip(":")] = int(size) * 1024
    unshared = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return Memory(sizes["Rss"] / MIB, sizes["Pss"] / MIB, unshared / MIB)


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far; raises `OSError`."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_files(pid: int) -> int:
    """Number of open file descriptors; raises `OSError`."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


class Connections:
    """TCP connections over IPv4 to or from some ports, at one moment."""

    def __init__(self, ports: Collection[int]) -> None:
        self._inodes: set[str] = set()
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, remote, state, *rest = line.split()
            ends = {int(end.partition(":")[2], 16) for end in (local, remote)}
            if state == ESTABLISHED and ends & set(ports):
                self._inodes.add(rest[5])

    def of(self, pid: int) -> int:
        """Number of these connections that a process holds; raises `OSError`."""
        count = 0
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                kind, _, inode = str(each.readlink()).partition(":[")
                count += kind == "socket" and inode.rstrip("]") in self._inodes
        return count
