"""Many real peers start at once and join a run from one address.

    python -m benchmarks.joining --relays 5 --workers 5

Prints one JSON object. Relays and idle workers, 50 of each by default, each `python -m swarm.peer`,
on this machine. No trainer runs, so the workers have nothing to generate. A peer has joined once it
is admitted and holds connections to `NEIGHBOURS_LEAST` other peers, or to all if there are fewer.
Then every peer rests, and its network process is measured: the workers' engines are processes of
their own, which are not counted. Times are seconds since the first peer was started:

    admitted_after       each peer's first admission
    all_connected_after  until every peer had joined; null if not all did
    missing, ended       peers not admitted after `JOIN_SECONDS`; that were refused, or broke
    groups               the network processes of each role: MiB resident and of its own (unshared),
                         percent of a core, connections
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import trio

from benchmarks.common import at_least, load_average, memory_of, processor_seconds, spread_of
from swarm.terminal.output import print_json
from tests.end_to_end.harness import (
    START_SECONDS,
    Peer,
    Swarm,
    make_base,
    running_fork_server,
    swarm,
)  # fmt: skip

ADMITTED = "membership.admitted"
ESTABLISHED = "01"
"""State of a TCP connection in /proc/net/tcp."""

PROGRESS_SECONDS = 10.0

NEIGHBOURS_LEAST = 8
"""Connections from which a peer no longer depends on a single other peer."""

JOIN_SECONDS = 420.0
"""For everybody to join. Whoever has not by then is counted as missing: with the rest of the
measurement and the start of the swarm this bounds the figure to about nine minutes."""

SETTLE_SECONDS = 30.0
"""Between the last join and the measurement: connections and routing tables fill meanwhile."""

IDLE_SECONDS = 30.0
"""The interval in which idle processor time is measured."""


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


async def measure(relays: int, workers: int) -> dict[str, Any]:
    joining = [f"relay-{i}" for i in range(relays)] + [f"inference-{i}" for i in range(workers)]
    names = ["bootstrap", "trainer", "validator", *joining]
    with tempfile.TemporaryDirectory(prefix="swarm-joining-") as folder, ExitStack() as stack:
        home, base = Path(folder), Path(folder) / "base"
        make_base(base)
        fork_server = stack.enter_context(running_fork_server(home))
        async with swarm(home, base, fork_server, names=names, steps=1) as peers:
            await peers.start("bootstrap", "validator")
            await peers["validator"].says("peer.status", seconds=START_SECONDS)
            began = time.time()
            await peers.start(*joining)
            return await _joined(peers, [peers[name] for name in joining], began)


async def _joined(peers: Swarm, joining: list[Peer], began: float) -> dict[str, Any]:
    ports = [peer.port for peer in peers.peers.values()]
    connected = None
    with trio.move_on_after(JOIN_SECONDS):
        await _connected(joining, ports)
        connected = round(time.time() - began, 1)
    await trio.sleep(SETTLE_SECONDS)
    alive = [peer for peer in joining if peer.status.value is None]
    for peer in (each for each in joining if each not in alive):
        print(f"{peer.name} ended: {peer.complaints[-1:]}", file=sys.stderr)
    resting = [peers["bootstrap"], peers["validator"], *alive]
    shares = await _processor_shares(resting)
    connections = Connections(ports)
    groups = {
        role: _group(some, shares, connections)
        for role in ("bootstrap", "validator", "relay", "inference")
        if (some := [peer for peer in resting if peer.role == role])
    }
    admitted = [each[0]["time"] - began for p in joining if (each := p.heard(ADMITTED))]
    return {
        "peers": len(joining),
        "admitted_after": spread_of(admitted) if admitted else None,
        "all_connected_after": connected,
        "missing": len(joining) - len(admitted),
        "ended": len(joining) - len(alive),
        "groups": groups,
    }


async def _connected(joining: list[Peer], ports: list[int]) -> None:
    """Wait until every peer that has not ended is admitted and connected."""
    shown = 0.0
    while True:
        alive = [peer for peer in joining if peer.status.value is None]
        connections = Connections(ports)
        admitted = [peer for peer in alive if peer.heard(ADMITTED)]
        held = [connections.of(peer.pid) for peer in admitted]
        # Each to the others that run, and to bootstrap and validator.
        least = min(NEIGHBOURS_LEAST, len(alive) + 1)
        if len(admitted) == len(alive) and min(held, default=least) >= least:
            return
        if time.monotonic() >= shown + PROGRESS_SECONDS:
            shown = time.monotonic()
            print(f"admitted {len(admitted)} of {len(joining)}", file=sys.stderr, flush=True)
        await trio.sleep(1)


async def _processor_shares(peers: list[Peer]) -> dict[str, float]:
    """Return each peer's share of one core over `IDLE_SECONDS`, in percent."""
    before = {peer.name: processor_seconds(peer.pid) for peer in peers}
    began = time.monotonic()
    await trio.sleep(IDLE_SECONDS)
    elapsed = time.monotonic() - began
    return {
        peer.name: 100 * (processor_seconds(peer.pid) - before[peer.name]) / elapsed
        for peer in peers
    }


def _group(peers: list[Peer], shares: dict[str, float], connections: Connections) -> dict[str, Any]:
    memory = [memory_of(peer.pid) for peer in peers]
    return {
        "processes": len(peers),
        "resident_mib": spread_of(each.resident for each in memory),
        "unshared_mib": spread_of(each.unshared for each in memory),
        "core_percent": spread_of(shares[peer.name] for peer in peers),
        "connections": spread_of(connections.of(peer.pid) for peer in peers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--relays", type=at_least(1), default=50)
    parser.add_argument("--workers", type=at_least(1), default=50)
    options = parser.parse_args()
    load = load_average()
    result = trio.run(measure, options.relays, options.workers)
    print_json({"load_average": load, **result})


if __name__ == "__main__":
    main()
