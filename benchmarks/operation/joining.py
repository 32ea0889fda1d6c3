"""A hundred real peers start at once and join a run from one address.

50 relays and 50 idle workers, each `python -m swarm.peer`, on this machine. No trainer runs, so the
workers have nothing to generate. A peer has joined once it is admitted and holds connections to
`NEIGHBOURS_LEAST` other peers. Then every peer rests, and its network process is measured: the
workers' engines are processes of their own, which are not counted.
"""

from __future__ import annotations

import time

import msgspec
import trio

from benchmarks.operation.processes import (
    Connections,
    Memory,
    memory_of,
    open_files,
    processor_seconds,
)
from benchmarks.operation.report import Spread, spread_of
from benchmarks.real_swarm import prepared
from tests.end_to_end.harness import Peer, Swarm, swarm

RELAYS, WORKERS = 50, 50
NEIGHBOURS_LEAST = 8
"""Connections from which a peer no longer depends on a single other peer."""

JOIN_SECONDS = 600.0
"""Deadline for everybody to join."""

SETTLE_SECONDS = 60.0
"""Between the last join and the measurement: connections and routing tables fill meanwhile."""

IDLE_SECONDS = 60.0
"""The interval in which idle processor time is measured."""


class Group(msgspec.Struct, frozen=True):
    """The network processes of one role at rest."""

    processes: int
    resident_mib: Spread
    proportional_mib: Spread
    unshared_mib: Spread
    core_percent: Spread
    """Processor time, of one core."""
    connections: Spread
    open_files: Spread


class Joining(msgspec.Struct, frozen=True):
    """Times are seconds since the first peer was started."""

    peers: int
    admitted_after: Spread
    """Each peer's first admission."""
    all_connected_after: float
    """Until every peer held `NEIGHBOURS_LEAST` connections as well."""
    refused: int
    """Peers that were refused for good."""
    groups: dict[str, Group]


def measure() -> Joining:
    return trio.run(_measure)


async def _measure() -> Joining:
    joining = [f"relay-{i}" for i in range(RELAYS)] + [f"inference-{i}" for i in range(WORKERS)]
    names = ["bootstrap", "trainer", "validator", *joining]
    with prepared() as (folder, base, fork_server):
        async with swarm(folder, base, fork_server, names=names, steps=1) as peers:
            await peers.start("bootstrap", "validator")
            await peers["validator"].says("peer.status", seconds=JOIN_SECONDS)
            began = time.time()
            await peers.start(*joining)
            return await _joined(peers, [peers[name] for name in joining], began)


async def _joined(peers: Swarm, joining: list[Peer], began: float) -> Joining:
    admitted = []
    for peer in joining:
        event = await peer.says("membership.admitted", seconds=JOIN_SECONDS)
        admitted.append(event["time"] - began)
    ports = [peer.port for peer in peers.peers.values()]
    with trio.fail_after(JOIN_SECONDS):
        await _connected(joining, ports)
    connected = time.time() - began
    await trio.sleep(SETTLE_SECONDS)
    resting = [peers["bootstrap"], peers["validator"], *joining]
    shares = await _processor_shares(resting)
    connections = Connections(ports)
    return Joining(
        peers=len(joining),
        admitted_after=spread_of(admitted),
        all_connected_after=round(connected, 1),
        refused=sum(peer.status.value is not None for peer in joining),
        groups={
            role: _group([p for p in resting if p.role == role], shares, connections)
            for role in ("bootstrap", "validator", "relay", "inference")
        },
    )


async def _connected(joining: list[Peer], ports: list[int]) -> None:
    while True:
        connections = Connections(ports)
        if all(connections.of(peer.pid) >= NEIGHBOURS_LEAST for peer in joining):
            return
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


def _group(peers: list[Peer], shares: dict[str, float], connections: Connections) -> Group:
    memory: list[Memory] = [memory_of(peer.pid) for peer in peers]
    return Group(
        processes=len(peers),
        resident_mib=spread_of(m.resident for m in memory),
        proportional_mib=spread_of(m.proportional for m in memory),
        unshared_mib=spread_of(m.unshared for m in memory),
        core_percent=spread_of(shares[peer.name] for peer in peers),
        connections=spread_of(connections.of(peer.pid) for peer in peers),
        open_files=spread_of(open_files(peer.pid) for peer in peers),
    )
